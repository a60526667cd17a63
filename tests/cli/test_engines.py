"""``--engine vllm`` where vLLM is not: a named error that says what to do, before anything is started."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from syncline.cli import app, engines
from syncline.cli.demo import fleet
from syncline.errors import AdapterError, SynclineError

if TYPE_CHECKING:
    from pathlib import Path

run = CliRunner()


@pytest.fixture(autouse=True)
def _nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: object, **__: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(engines, "find_spec", lambda name: None if name == "vllm" else name)
    monkeypatch.setattr(fleet.subprocess, "Popen", start)


def _script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("command", [["demo"], ["verify", "checkpoint"]])
def test_this_interpreter_lacks_vllm(command: list[str], tmp_path: Path) -> None:
    extra = ["--cache", str(tmp_path / "cache")] if command == ["demo"] else []
    done = run.invoke(app, [*command, *extra, "--engine", "vllm"])
    assert done.exit_code in (1, 2)
    assert "vLLM cannot be run by this Python interpreter" in done.output
    assert f"no vllm for {sys.executable}" in done.output
    assert "--engine-python .venv-vllm/bin/python" in done.output
    assert not (tmp_path / "cache").exists()  # the model was not prepared either


def test_the_failure_as_json(tmp_path: Path) -> None:
    done = run.invoke(app, ["verify", str(tmp_path), "--engine", "vllm", "--json"])
    assert done.exit_code == 2
    assert json.loads(done.stdout)["error"]["what"].startswith("vLLM cannot be run")


def test_engines_that_cannot_be_listed_or_shown(tmp_path: Path) -> None:
    done = run.invoke(app, ["verify", str(tmp_path), "--engine", "transformers"])
    assert done.exit_code == 2
    assert "'vllm', 'sglang'" in done.output
    done = run.invoke(app, ["demo", "--engine", "sglang"])
    assert done.exit_code == 2
    assert "'transformers'" in done.output


def test_a_directory_that_no_demo_left(tmp_path: Path) -> None:
    done = run.invoke(app, ["verify", str(tmp_path)])
    assert done.exit_code == 2
    assert "demo.json is missing" in done.output


class TestInterpreter:
    """Of another environment; probed by a real process."""

    @pytest.fixture(autouse=True)
    def _processes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.undo()

    def test_what_does_not_exist(self, tmp_path: Path) -> None:
        with pytest.raises(SynclineError, match="not a Python interpreter"):
            engines.vllm(tmp_path / "nothing")

    @pytest.mark.parametrize("text", ["true", "false", "echo hello"])
    def test_what_is_no_python(self, tmp_path: Path, text: str) -> None:
        with pytest.raises(SynclineError, match="not a Python interpreter"):
            engines.vllm(_script(tmp_path / "python", text))

    def test_one_without_syncline(self, tmp_path: Path) -> None:
        bare = _script(tmp_path / "python", f'exec {sys.executable} -S "$@"')  # no site, no packages
        with pytest.raises(SynclineError, match="cannot be run") as caught:
            engines.vllm(bare)
        assert "no vllm and no syncline" in str(caught.value)

    def test_one_with_both(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
        monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
        (tmp_path / "pyvenv.cfg").write_text("")
        (tmp_path / "bin").mkdir()
        found = engines.vllm(_script(tmp_path / "bin" / "python", "echo looked for"))
        assert found.command == (str(tmp_path / "bin" / "python"), "-P", "-W", "ignore")
        assert "VLLM_LOGGING_LEVEL" not in found.environment  # what is set stays
        assert found.environment["VLLM_PLUGINS"] == "syncline"
        assert found.environment["NUMBA_CACHE_DIR"] == str(tmp_path / "numba")


class TestListing:
    """What ``verify --engine vllm`` makes of an engine's answer."""

    RANK = {  # noqa: RUF012 (a constant)
        "tensors": {
            "a.weight": {"status": "synced", "names": ["q", "k"], "dtype": "bfloat16", "shape": [4, 2]},
            "a.scale": {"status": "derived", "names": [], "dtype": "float32", "shape": [1]},
            "rope": {"status": "local", "names": [], "dtype": "float32", "shape": [8]},
        },
        "own": {"a.weight": 2},
        "ways": {"in place": 2, "reload": 0},
        "unused": ["mtp.weight"],
    }

    @pytest.fixture
    def asked(self, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
        seen: list[dict[str, object]] = []

        def ask(_interpreter: object, request: dict[str, object]) -> list[object]:
            seen.append(request)
            if request["dtype"] == "float64":
                raise AdapterError("a live parameter that no checkpoint tensor fills", tensor="b.weight")
            return [self.RANK]

        module = sys.modules["syncline.cli.verify"]  # the package's attribute of that name is the command
        monkeypatch.setattr(module, "vllm", lambda python: python)
        monkeypatch.setattr(module, "_ask", ask)
        return seen

    def test_everything_is_listed(self, asked: list[dict[str, object]]) -> None:
        line = ["verify", "dir", "--engine", "vllm", "--ranks", "2", "--local", "x.*", "--local", "y"]
        done = run.invoke(app, line)
        assert done.exit_code == 0
        assert (
            "synced   a.weight bfloat16[4, 2] <- q and 1 more; 2 elements are the engine's own\n"
            in done.stdout
        )
        assert "derived  a.scale float32[1]\n" in done.stdout
        assert "local    rope float32[8]\n" in done.stdout
        assert "does not load: mtp.weight" in done.stdout
        assert "3 live tensors: 1 synced, 1 derived, 1 local; put in: 2 in place, 0 reload" in done.stdout
        assert asked == [
            {"directory": "dir", "ranks": 2, "dtype": "auto", "local": ["x.*", "y"], "engine": "vllm"}
        ]

    def test_of_sglang_likewise(
        self, asked: list[dict[str, object]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sys.modules["syncline.cli.verify"], "sglang", lambda python: python)
        done = run.invoke(app, ["verify", "dir", "--engine", "sglang"])
        assert done.exit_code == 0
        assert "derived  a.scale float32[1]\n" in done.stdout
        assert [request["engine"] for request in asked] == ["sglang"]

    def test_as_json(self, asked: list[dict[str, object]]) -> None:
        done = run.invoke(app, ["verify", "dir", "--engine", "vllm", "--json"])
        assert done.exit_code == 0
        assert json.loads(done.stdout) == {"explained": True, "ranks": [self.RANK], "error": None}
        assert len(asked) == 1

    def test_what_is_unexplained_fails_by_name(self, asked: list[dict[str, object]]) -> None:
        line = ["verify", "dir", "--engine", "vllm", "--dtype", "float64"]
        done = run.invoke(app, line)
        assert done.exit_code == 1
        assert "b.weight" in done.output
        done = run.invoke(app, [*line, "--json"])
        assert done.exit_code == 1
        told = json.loads(done.stdout)
        assert told["explained"] is False
        assert told["error"]["tensor"] == "b.weight"
        assert len(asked) == 2
