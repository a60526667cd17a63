"""An engine that speculates with a draft model: refused by name (B98), or the draft stays as it was (B99)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.engines import checkpoints
from tests.engines.vllm.running import needs_vllm, play

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1200), needs_vllm]


def test_a_draft_model_is_refused_or_stays_frozen_by_declaration(tmp_path: Path) -> None:
    draft, a, b = (
        str(checkpoints.make("qwen3", tmp_path / name, seed)) for seed, name in enumerate(("draft", "a", "b"))
    )
    seen = play(tmp_path, play="draft", draft=draft, versions=[a, b])
    assert seen["refused"]["kind"] == "AdapterError"
    assert "draft model" in seen["refused"]["what"]
    assert "frozen_draft" in seen["refused"]["expected"]
    assert seen["same"], "rejected guesses change no answer"
    before, after = seen["draft"]
    assert before == after
    assert before[0]
