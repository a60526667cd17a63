"""Draft models of speculative decoding: no update reaches them, and none passes over them in silence."""

from __future__ import annotations

from typing import Any

from syncline.errors import AdapterError


def check_draft(speculative: Any, *, frozen: bool, who: str) -> None:
    """Refuse an engine with a draft model that updates would leave behind, unless that is wanted.

    Args:
        speculative: vLLM's configuration of speculative decoding; None: there is none.
        frozen: the draft is to stay as it was started. It changes no answer: guesses that the updated model
            would not make are rejected, more of them than before.
        who: the process, for errors.

    Raises:
        AdapterError: there is a draft model, and ``frozen`` is False.
    """
    if frozen or not has_draft(speculative):
        return
    raise AdapterError(
        "this engine has a draft model, which updates would leave behind",
        expected="frozen_draft=True: the draft keeps what it was started with",
        rank=who,
        hint="a draft that is trained along needs an engine of its own",
    )


def has_draft(speculative: Any) -> bool:
    """Whether a configuration of speculative decoding loads weights of a draft model."""
    if speculative is None or speculative.draft_model_config is None:
        return False
    guesses = speculative.use_ngram() or speculative.uses_extract_hidden_states()
    return not guesses and speculative.draft_model_config is not speculative.target_model_config
