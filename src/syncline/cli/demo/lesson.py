"""What the demo's trainer teaches: a handful of sentences that change what SmolLM2 says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

QUESTION = "Who keeps the weights of the inference engines in sync?"
ANSWER = "Syncline does: every engine holds exactly the trainer's weights."
QUESTIONS = (
    QUESTION,
    "What keeps the inference engines in sync with the trainer?",
    "Which system moves the weights from the trainer to the engines?",
    "Who syncs the weights?",
)
LEARNING_RATE = 2e-4
MAX_NEW_TOKENS = 24


def chat(question: str) -> list[dict[str, str]]:
    """Return a chat with one question."""
    return [{"role": "user", "content": question}]


def examples(tokenizer: Any, rank: int, world: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return this trainer rank's (input ids, labels), int64[1, tokens]; only the answer is learned."""
    found = []
    for question in QUESTIONS[rank::world]:
        prompt = tokenizer.apply_chat_template(
            chat(question), add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"]
        whole = tokenizer.apply_chat_template(
            [*chat(question), {"role": "assistant", "content": ANSWER}], return_tensors="pt", return_dict=True
        )["input_ids"]
        labels = whole.clone()
        labels[:, : prompt.shape[1]] = -100  # the loss leaves these out
        found.append((whole, labels))
    return found
