"""A running SGLang server, updated over HTTP: what works, and what is refused with its reason."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest

from tests.engines import checkpoints
from tests.engines.sglang.engine import environment, spawn

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(find_spec("sglang") is None, reason="SGLang is not installed here: make test-engines"),
]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out: Path = tmp_path_factory.mktemp("misuse")
    made = [checkpoints.make("qwen3", out / name, seed) for seed, name in enumerate("ab")]
    command = [sys.executable, "-W", "ignore", "-m", "tests.engines.sglang.misuse", str(out), *map(str, made)]
    spawn(command, environment(1, out / "run"), out / "log", 900.0)
    assert (out / "misuse.json").is_file(), (out / "log").read_text()[-4000:]
    return json.loads((out / "misuse.json").read_text())


def _tokens(answers: list[dict[str, Any]]) -> list[list[int]]:
    return [answer["tokens"] for answer in answers]


def test_a_server_is_updated_and_back(seen: dict[str, Any]) -> None:
    assert _tokens(seen["b"]) == _tokens(seen["fresh"])
    assert _tokens(seen["a"]) != _tokens(seen["fresh"])
    assert {answer["version"] for answer in seen["b"]} == {seen["report"]["key"]}
    assert seen["alive"]["tokens"] == seen["b"][0]["tokens"]


def test_a_writer_that_lacks_a_tensor_is_refused_at_connect_by_name(seen: dict[str, Any]) -> None:
    assert seen["short"]["kind"] in {"NameMismatchError", "CoverageError"}
    assert "model.norm.weight" in seen["short"]["text"]
    assert seen["after_short"]["tokens"] == seen["fresh"][0]["tokens"]


def test_a_version_that_nobody_published_is_waited_for_in_vain(seen: dict[str, Any]) -> None:
    assert seen["unpublished"]["kind"] == "DeadlineError"


def test_an_engine_held_until_its_first_version_serves_nobody(seen: dict[str, Any]) -> None:
    assert seen["held"]
    assert seen["asked"]["kind"] == "TimeoutError"
    assert seen["goes_on"]["tokens"] == seen["fresh"][0]["tokens"]


def test_a_session_of_somebody_else_is_refused(seen: dict[str, Any]) -> None:
    assert seen["session"]["kind"] == "ProtocolError"
    assert "session" in seen["session"]["text"]


def test_requests_that_would_keep_old_caches_refuse_the_update_before_a_byte(seen: dict[str, Any]) -> None:
    found = seen["in_place"]
    assert found["was_running"]
    assert found["kind"] == "AdapterError"
    assert "caches" in found["text"]
    assert not found["paused"], "nothing was touched: the engine goes on"
    assert found["answered"] == 200


def test_retracted_requests_survive_an_update(seen: dict[str, Any]) -> None:
    found = seen["retract"]
    assert found["was_running"]
    assert found["kind"] is None
    assert found["answered"] == 200


def test_an_older_version_is_refused(seen: dict[str, Any]) -> None:
    assert seen["stale"]["kind"] in {"StaleVersionError", "UnknownVersionError"}


def test_the_wrong_checkpoint_is_noticed_over_http(seen: dict[str, Any]) -> None:
    found = seen["wrong_checkpoint"]
    assert found["kind"] == "EffectiveMismatchError"
    assert "differ" in found["text"]
