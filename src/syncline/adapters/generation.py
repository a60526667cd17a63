"""Greedy generation with Transformers, in step on all ranks of an instance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from syncline.adapters.channel import Channel
    from syncline.protocol.ids import VersionKey


@dataclass(frozen=True, slots=True)
class Completion:
    """What an instance answered to one prompt.

    Attributes:
        text: the new text, without special tokens.
        tokens: the new token ids, without the end token.
        finish: ``stop`` at an end token, ``length`` at the limit, ``aborted`` by a pause.
        version: the weights that generated all of it; None before the first update.
    """

    text: str
    tokens: tuple[int, ...]
    finish: Literal["stop", "length", "aborted"]
    version: VersionKey | None


class _InStep:
    """Takes rank 0's greedy token and its wish to stop, at every step, on every rank.

    Ranks whose sums differ in the last bit could otherwise choose different tokens, end at different steps
    and wait for each other for ever.
    """

    def __init__(self, channel: Channel, stop: Callable[[], bool]) -> None:
        self._channel, self._stop = channel, stop
        self.stopped = False

    def choose(self, scores: torch.Tensor) -> torch.Tensor:
        """Return scores that leave one token each, and note whether to stop."""
        tokens, self.stopped = self._channel.agree(scores.argmax(-1), stop=self._stop())
        return torch.full_like(scores, -torch.inf).scatter_(-1, tokens[:, None], 0.0)


class _Choose(LogitsProcessor):
    def __init__(self, step: _InStep) -> None:
        self._step = step

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        del input_ids
        return self._step.choose(scores)


class _Stop(StoppingCriteria):
    def __init__(self, step: _InStep) -> None:
        self._step = step

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        del scores, kwargs
        return torch.full((input_ids.shape[0],), self._step.stopped, device=input_ids.device)


def greedy(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    channel: Channel,
    stop: Callable[[], bool],
    version: VersionKey | None,
) -> list[Completion]:
    """Generate on this rank, in step with the others; all pass the same prompts.

    Args:
        model: with a language-model head.
        tokenizer: decodes; used on rank 0 only, the others return no text.
        prompts: token ids.
        max_new_tokens: at least 1.
        channel: of the instance.
        stop: asked at every step on rank 0: whether to end now.
        version: what the completions say.
    """
    if not prompts:
        return []
    step = _InStep(channel, stop)
    ends = _ends(model)
    pad = ends[0] if ends else 0
    width = max(map(len, prompts))
    ids = torch.tensor([[pad] * (width - len(p)) + list(p) for p in prompts], device=model.device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=model.device)
    with torch.no_grad():
        out = model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=max_new_tokens,
            do_sample=False,
            num_beams=1,
            pad_token_id=pad,
            logits_processor=LogitsProcessorList([_Choose(step)]),
            stopping_criteria=StoppingCriteriaList([_Stop(step)]),
        )
    if channel.rank:
        return []
    return [_completion(row[width:].tolist(), ends, step.stopped, tokenizer, version) for row in out]


def _ends(model: Any) -> list[int]:
    end = model.generation_config.eos_token_id
    return [] if end is None else [end] if isinstance(end, int) else list(end)


def _completion(
    tokens: list[int], ends: list[int], stopped: bool, tokenizer: Any, version: VersionKey | None
) -> Completion:
    cut = next((i for i, token in enumerate(tokens) if token in ends), None)
    finish: Literal["stop", "length", "aborted"] = (
        "stop" if cut is not None else "aborted" if stopped else "length"
    )
    kept = tokens[:cut]
    return Completion(tokenizer.decode(kept, skip_special_tokens=True), tuple(kept), finish, version)
