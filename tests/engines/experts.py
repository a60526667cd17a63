"""Which experts a mixture's routers choose, counted by a hook in Transformers' model of the checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tests.engines import checkpoints

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def reached(directory: Path, tokens: Sequence[Sequence[int]]) -> dict[str, set[int]]:
    """Return, by layer, the experts that are met on each prompt and the tokens that answered it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415 (heavy)

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    found: dict[str, set[int]] = {}

    def note(name: str) -> Any:
        def hook(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = (*args, *kwargs.values())
            chosen = [x for x in given if isinstance(x, torch.Tensor) and x.dtype == torch.int64]
            found.setdefault(name, set()).update(chosen[0].flatten().tolist())

        return hook

    for name, module in model.named_modules():
        if type(module).__name__.endswith("Experts"):
            module.register_forward_pre_hook(note(name), with_kwargs=True)
    with torch.no_grad():
        for prompt, answer in zip(checkpoints.PROMPTS, tokens, strict=True):
            model(torch.tensor([[*tokenizer(prompt)["input_ids"], *answer]]))
    return found


def met(family: str, answered: Sequence[tuple[Path, Sequence[Sequence[int]]]]) -> str:
    """Return "met/all": the fewest experts that a layer's router chose with any of the checkpoints.

    Args:
        family: of the checkpoints; one without experts gives "".
        answered: checkpoints, each with the tokens that answered the prompts.
    """
    if family not in checkpoints.EXPERTS:
        return ""
    fewest = [min(map(len, reached(*one).values()), default=0) for one in answered]
    return f"{min(fewest)}/{checkpoints.EXPERTS[family]}"
