"""What can be given wrongly to an engine's adapter, where no engine is needed to see it refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from syncline.adapters import checked
from syncline.adapters.vllm.adapter import VLLMAdapter
from syncline.adapters.vllm.draft import check_draft
from syncline.errors import AdapterError, EffectiveMismatchError, ProtocolError
from syncline.layout.loader import Spec
from syncline.store.adapter import Stage
from syncline.verify.twin import TwinReport
from tests.protocol.driver import Job, publish

if TYPE_CHECKING:
    from pathlib import Path

SPECS = {"a.weight": Spec((2, 3), "float32")}


@pytest.mark.parametrize("index", [-1, 2, 7])
def test_a_stage_that_does_not_exist(index: int) -> None:
    adapter: Any = VLLMAdapter.__new__(VLLMAdapter)
    stages = (Stage("direct", (0,)), Stage("layer", (1,)))
    adapter.layout = SimpleNamespace(plan=SimpleNamespace(stages=stages, groups=((),)))
    adapter.rank, adapter._first = 3, 1
    for member in (adapter.begin_stage, adapter.end_stage):
        with pytest.raises(AdapterError, match="no such stage") as caught:
            member(index)
        assert caught.value.rank == "rank 3"


def _speculative(draft: object, target: object, *, guesses: bool = False) -> Any:
    return SimpleNamespace(
        draft_model_config=draft,
        target_model_config=target,
        use_ngram=lambda: guesses,
        uses_extract_hidden_states=lambda: False,
    )


def test_a_draft_model_is_refused_unless_it_is_to_stay_frozen() -> None:
    speculative = _speculative("a draft", "the model")
    with pytest.raises(AdapterError, match="draft model") as caught:
        check_draft(speculative, frozen=False, who="rank 1")
    assert caught.value.rank == "rank 1"
    assert "frozen_draft=True" in str(caught.value)
    check_draft(speculative, frozen=True, who="rank 1")


@pytest.mark.parametrize(
    "speculative",
    [
        None,
        _speculative(None, "the model"),
        _speculative("the model", "the model"),
        _speculative("a copy", "the model", guesses=True),
    ],
)
def test_guessing_without_a_model_is_no_draft(speculative: Any) -> None:
    check_draft(speculative, frozen=False, who="")


def test_an_engine_that_comes_back_with_other_ranks_is_refused_while_the_old_one_lives() -> None:
    job = Job()
    publish(job.writers(), 1)
    old = job.fleet("engine", 2)
    old.update(1)
    with pytest.raises(ProtocolError, match="differ in world") as caught:
        job.fleet("engine", 1, process="restarted")
    assert (caught.value.expected, caught.value.found) == ("2", "1")
    for member in old.all:
        member.leave()
    begun = job.fleet("engine", 1, process="restarted").update(1)
    assert begun.committed is None, "it holds nothing of what the old one held"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "syncline" / "twins"


def test_the_twin_check_runs_once_for_a_build_and_a_checkpoint() -> None:
    ran: list[int] = []

    def check() -> TwinReport:
        ran.append(1)
        return TwinReport(1, 6, 6, 0, 0, 1)

    assert checked.once({"engine": "e 1"}, SPECS, check)
    assert not checked.once({"engine": "e 1"}, SPECS, check)
    assert checked.once({"engine": "e 2"}, SPECS, check)
    assert checked.once({"engine": "e 1"}, SPECS | {"b": Spec((1,), "float32")}, check)
    assert checked.once({"engine": "e 1"}, {"a.weight": Spec((3, 2), "float32")}, check)
    assert len(ran) == 4


def test_a_twin_check_that_fails_is_not_remembered(cache: Path) -> None:
    def fail() -> TwinReport:
        raise EffectiveMismatchError("elsewhere")

    for _ in range(2):
        with pytest.raises(EffectiveMismatchError):
            checked.once({"engine": "e 1"}, SPECS, fail)
    assert not cache.exists()


def test_a_place_that_cannot_be_written_costs_only_the_memory(
    cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text("a file")
    for _ in range(2):
        assert checked.once({"engine": "e 1"}, SPECS, lambda: TwinReport(1, 6, 6, 0, 0, 1))
    assert "cannot be remembered" in caplog.text
