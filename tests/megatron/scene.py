"""Real Megatron ranks in processes of their own: ``python -m tests.megatron.scene CASES OUT``.

CASES is JSON, a list of cases; OUT is a directory. Both libraries are imported once; for every case as many
ranks are forked as its cut has, and a reader where it publishes. What each saw is written into
``OUT/NAME-RANK.json``.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import sys
import time
import traceback
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from syncline.adapters.megatron import BlockFP8, MegatronTrainer, oracle, state
from syncline.adapters.megatron.bridge import BridgeExport
from syncline.adapters.module import ModuleEngine
from syncline.errors import SynclineError, to_wire
from syncline.kernels.fp8 import quantise
from syncline.layout import Rules
from syncline.options import Options
from syncline.store.reader import WeightReader
from syncline.store.writer import WeightWriter
from tests.engines import checkpoints
from tests.megatron import broken, busy, cpu, mappings, models, scale
from tests.store.pair import blank, module

if TYPE_CHECKING:
    from collections.abc import Callable

SECONDS = 150.0
OPTIONS = {"connect_timeout": 90.0, "update_timeout": 60.0, "stall": 30.0, "lease": 60.0}


class Rank:
    """One forked trainer rank."""

    def __init__(self, case: dict[str, Any], out: Path, number: int) -> None:
        self.case, self.out, self.number = case, out, number
        self.cut = models.Cut(**case["cut"])
        store = out / f"{case['name']}.store"
        dist.init_process_group("gloo", rank=number, world_size=self.cut.world, init_method=f"file://{store}")
        cpu.OnCPU().__enter__()
        if "mappings" in case:
            getattr(mappings, case["mappings"])()
        models.groups(self.cut)
        self.model = models.build(
            case["family"],
            self.cut,
            dtype=case.get("dtype", "float32"),
            megatron=case.get("megatron"),
            **case.get("changes", {}),
        )
        models.scramble(self.model)
        self.optimizer: Any = None

    def optimise(self) -> None:
        """Make a plain optimizer, or Megatron's distributed one with everything overlapped."""
        if self.case.get("overlap"):
            models.wrap(self.model)
            self.optimizer = self.model.optimizer
            return
        self.optimizer = torch.optim.AdamW(
            [parameter for chunk in self.model.chunks for parameter in chunk.parameters()], lr=1e-2
        )

    def trainer(self, **more: Any) -> Any:

        given = {"bridge": self.model.bridge} | more
        if "fp8" in self.case:
            given["fp8"] = BlockFP8(tuple(self.case["fp8"]), halo="exchange", timeout=60.0)
        return MegatronTrainer(self.model.chunks, self.optimizer, **given)

    def step(self) -> float:
        loss = models.step(self.model, self.cut, self.optimizer)
        for chunk in self.model.chunks:  # a router's bias is no parameter: training moves it in another way
            for name, buffer in models.buffers(chunk):
                if name.endswith("expert_bias"):
                    buffer.add_(0.01)
        return loss

    def exported(self) -> dict[str, torch.Tensor]:
        """Return the whole model by Megatron-Bridge's own export; collective."""
        exported = self.model.bridge.export_hf_weights(self.model.chunks, cpu=True, show_progress=False)
        kept = {name: tensor.clone() for name, tensor in exported}
        return quantised(kept, self.case["fp8"]) if "fp8" in self.case else kept


def learn(rank: Rank) -> dict[str, Any]:
    """Compare what was learned with the export after a real step, and with coordinates."""

    rank.optimise()
    began = time.monotonic()
    trainer = rank.trainer(**({"exporter": whole_exporter, "bridge": None} if rank.case.get("whole") else {}))
    seconds = time.monotonic() - began
    loss = rank.step()
    trainer.quiesce()
    whole = rank.exported()
    equal = oracle.check_values(trainer, whole.items())
    probed = 0
    if not rank.case.get("whole"):
        tensors = state.live_tensors(trainer._tree, rank.number)
        export = BridgeExport(rank.model.bridge, trainer.chunks, tensors)
        probed = oracle.agree(trainer.learned.held, oracle.probe(export, tensors))
    learned = trainer.learned
    return {
        "seconds": seconds,
        "loss": loss,
        "names": sorted({one.name for one in learned.held}),
        "boxes": len(learned.held),
        "elements": sum(one.box.numel for one in learned.held),
        "equal": equal,
        "probed": probed,
        "aliases": learned.aliases,
        "shared": sorted(learned.shared),
        "dropped": learned.dropped,
        "computed": {name: list(ops) for name, ops in trainer.computed.items()},
        "exported": sorted(whole),
        "dtypes": sorted({one.dtype for one in learned.held}),
    }


def quantised(whole: dict[str, torch.Tensor], patterns: list[str]) -> dict[str, torch.Tensor]:
    """Return a whole checkpoint with some tensors in blocks of fp8, by the reference."""
    out: dict[str, torch.Tensor] = {}
    for name, tensor in whole.items():
        out[name] = tensor
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            payload, scale = quantise(tensor.contiguous().view(torch.int16).numpy().view(np.uint16))
            out[name] = torch.from_numpy(payload).view(torch.float8_e4m3fn)
            out[f"{name}_scale_inv"] = torch.from_numpy(scale)
    return out


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor


def whole_exporter(whole: Any) -> dict[str, torch.Tensor]:
    """Convert a whole Megatron model as a user's script would: knows the model, and nothing of ranks."""
    groups, head = 4, 32
    out: dict[str, torch.Tensor] = {}
    names = {
        "embedding.word_embeddings.weight": "model.embed_tokens.weight",
        "output_layer.weight": "lm_head.weight",
        "decoder.final_layernorm.weight": "model.norm.weight",
    }
    parts = {
        "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
        "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
        "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
        "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
        "input_layernorm.weight": "input_layernorm.weight",
        "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
        "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
        "mlp.linear_fc2.weight": "mlp.down_proj.weight",
        "mlp.router.weight": "mlp.gate.weight",
    }
    projections = {
        "linear_fc1.weight_w": "gate_proj", "linear_fc1.weight_v": "up_proj", "linear_fc2.weight": "down_proj"
    }  # fmt: skip
    for name, tensor in whole.items():
        if name in names:
            out[names[name]] = tensor
            continue
        _, _, layer, rest = name.split(".", 3)
        prefix = f"model.layers.{layer}."
        if rest.startswith("mlp.experts."):
            expert, last = rest.removeprefix("mlp.experts.experts.").split(".", 1)
            out[f"{prefix}mlp.experts.{expert}.{projections[last]}.weight"] = tensor
        elif rest.endswith("linear_qkv.weight"):
            heads = tensor.view(groups, -1, head, tensor.shape[-1])
            for part, piece in zip("qkv", heads.split([heads.shape[1] - 2, 1, 1], dim=1), strict=True):
                out[f"{prefix}self_attn.{part}_proj.weight"] = piece.reshape(-1, tensor.shape[-1])
        elif rest.startswith("mlp.linear_fc1.weight_"):
            kind = {"w": "gate", "v": "up"}[rest[-1]]
            out[f"{prefix}mlp.{kind}_proj.weight"] = tensor
        elif rest.endswith("linear_fc1.weight"):
            out[f"{prefix}mlp.gate_proj.weight"], out[f"{prefix}mlp.up_proj.weight"] = tensor.chunk(2)
        else:
            out[prefix + parts[rest]] = tensor
    return out


def publish(rank: Rank) -> dict[str, Any]:
    """Publish two versions, real steps between them, and export each for the reader to compare with."""

    rank.optimise()
    trainer = rank.trainer()
    trainer.quiesce()
    _save(rank, "0", rank.exported())
    mains: list[int] = []
    # what is held alike by all its ranks is asked for once; the tied name too, by a reader that has both
    writer = WeightWriter(
        trainer, job=rank.case["name"], options=Options(**OPTIONS), rules=Rules(**rank.case.get("rules", {}))
    )
    stale: list[int] = []
    waiting = rank.case.get("patience", 60.0)
    writer.await_readers(rank.case.get("instance", "plain"), timeout=waiting)
    if "slow" in rank.case:
        seen = busy.versions(rank, writer, functools.partial(_save, rank))
        writer.close()
        return seen
    for version in (1, 2):
        rank.step()
        before = {n: p.detach().clone() for chunk in rank.model.chunks for n, p in chunk.named_parameters()}
        publication = writer.publish(version)
        now = {n: p.detach() for chunk in rank.model.chunks for n, p in chunk.named_parameters()}
        stale.append(sum(not torch.equal(before[n], now[n]) for n in before))
        _save(rank, str(version), rank.exported())
        mains.append(models.main_parameters_agree(rank.model, rank.optimizer))
        publication.wait_committed(waiting)
    writer.close()
    return {"stale": stale, "mains": mains}


def _save(rank: Rank, version: str, tensors: dict[str, torch.Tensor]) -> None:
    if rank.number == 0:
        path = rank.out / f"{rank.case['name']}-{version}.safetensors"
        if rank.case.get("outside"):
            path = checkpoint(rank.case, rank.out, version) / "model.safetensors"
        kept = path.with_suffix(".tmp")
        save_file({n: t.contiguous() for n, t in tensors.items()}, kept, metadata={"format": "pt"})
        kept.rename(path)


def checkpoint(case: dict[str, Any], out: Path, version: int | str) -> Path:
    """Return the directory of a version: the family's configuration and tokenizer, no weights yet."""
    base, directory = out / f"{case['name']}-base", out / f"{case['name']}-{version}"
    if not base.is_dir():
        checkpoints.make(case["family"], base, dtype=case.get("dtype", "float32"))
    if not directory.is_dir():
        shutil.copytree(base, directory, ignore=shutil.ignore_patterns("*.safetensors*"))
    return directory


def read(case: dict[str, Any], out: Path) -> dict[str, Any]:
    """Receive both versions into a module of the checkpoint's own form; compare each with its export."""

    def file(version: int) -> dict[str, torch.Tensor]:
        path = out / f"{case['name']}-{version}.safetensors"
        limit = time.monotonic() + 100
        while not path.is_file():
            if time.monotonic() > limit:
                raise TimeoutError(path)
            time.sleep(0.05)
        return load_file(path)

    first = file(0)
    keep = case.get("rows")
    if keep:
        first = {n: t[:keep] if t.shape[0] > keep else t for n, t in first.items()}
    live = blank(first)
    engine = ModuleEngine(module(live))
    reader = WeightReader(engine, instance="plain", job=case["name"], options=Options(**OPTIONS))
    seen: dict[str, Any] = {"versions": [], "began": []}
    for version in (1, 2):
        time.sleep(case.get("slow", 0.0))
        seen["began"].append(time.monotonic())
        report = reader.update(version, timeout=60.0, verify="installed")
        expected = file(version)
        held = {name: tensor.detach() for name, tensor in engine.model.named_parameters()}
        unequal = [n for n in held if not torch.equal(_bits(held[n]), _bits(expected[n][: len(held[n])]))]
        still = [n for n in held if torch.equal(_bits(file(version - 1)[n]), _bits(expected[n]))]
        needed = sum(tensor.nbytes for tensor in held.values())
        seen["versions"].append(
            {
                "tensors": len(held), "unequal": unequal, "still": still, "level": str(report.level),
                "nbytes": report.nbytes, "needed": needed,
            }
        )  # fmt: skip
    reader.close()
    return seen


def refuse(rank: Rank) -> dict[str, Any]:
    """Break something, and return what the trainer adapter says."""

    rank.optimise()
    try:
        getattr(broken, rank.case["how"])(rank)
    except SynclineError as error:
        return dict(to_wire(error))
    return {}


def trillion(_rank: Rank) -> dict[str, Any]:
    """Learn one rank's share of a very large model."""
    return scale.learned()


PLAYS: dict[str, Callable[[Rank], dict[str, Any]]] = {
    "learn": learn,
    "publish": publish,
    "refuse": refuse,
    "trillion": trillion,
}


def _child(case: dict[str, Any], out: Path, number: int) -> None:
    try:
        os.environ["SYNCLINE_RUN_DIR"] = str(out / "run")
        seen = read(case, out) if number < 0 else PLAYS[case["play"]](Rank(case, out, number))
    except BaseException:
        (out / f"{case['name']}-{number}.error").write_text(traceback.format_exc())
        os._exit(1)
    (out / f"{case['name']}-{number}.json").write_text(json.dumps(seen))
    os._exit(0)


def run(case: dict[str, Any], out: Path) -> None:
    """Fork the ranks of a case and wait for them; what does not end is ended."""
    numbers = list(range(models.Cut(**case["cut"]).world))
    if case["play"] == "publish" and not case.get("outside"):
        numbers.append(-1)
    children = []
    for number in numbers:
        child = os.fork()
        if child == 0:
            _child(case, out, number)
        children.append(child)
    limit = time.monotonic() + case.get("seconds", SECONDS)
    failed = False
    while children and time.monotonic() < limit and not failed:
        for child in list(children):
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                children.remove(child)
                failed |= status != 0
        time.sleep(0.02)
    time.sleep(2.0 if failed and children else 0.0)  # the others may say why they stop
    for child in children:
        if os.waitpid(child, os.WNOHANG)[0] == 0:
            os.kill(child, 9)
            os.waitpid(child, 0)


def main() -> None:
    cases, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    cpu.prepare()
    import transformers.models.deepseek_v3.configuration_deepseek_v3  # noqa: PLC0415 (only where it is installed)
    import transformers.models.qwen3.configuration_qwen3  # noqa: PLC0415 (only where it is installed)
    import transformers.models.qwen3_moe.configuration_qwen3_moe  # noqa: F401, PLC0415

    for case in cases:
        run(case, out)


if __name__ == "__main__":
    main()
