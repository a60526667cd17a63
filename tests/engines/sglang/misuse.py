"""A server by its URL, used rightly and wrongly: one engine start for all that must not go wrong silently.

python -m tests.engines.sglang.misuse DIRECTORY CHECKPOINT_A CHECKPOINT_B    (under `engine.environment`)

Writes what it saw as JSON; the tests judge it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.engines.checkpoints import PROMPTS
from tests.engines.sglang.engine import ARGUMENTS, TOKENS, say
from tests.engines.sglang.scene import JOB, Writer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Server:
    """An SGLang server in a process group of its own."""

    def __init__(self, checkpoint: Path, log: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        options = [
            f"--{name.replace('_', '-')}={value}" for name, value in ARGUMENTS.items() if value is not True
        ]
        flags = [f"--{name.replace('_', '-')}" for name, value in ARGUMENTS.items() if value is True]
        command = [sys.executable, "-W", "ignore", "-m", "sglang.launch_server"]
        command += [f"--model-path={checkpoint}", f"--port={port}", "--host=127.0.0.1", "--dtype=bfloat16"]
        with log.open("w") as file:
            self._process = subprocess.Popen(
                [*command, *options, *flags],
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def post(self, path: str, body: dict[str, Any], timeout: float = 60.0) -> tuple[int, str]:
        request = urllib.request.Request(  # noqa: S310 (our own server)
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:  # noqa: S310 (our own server)
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def await_health(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if self._process.poll() is not None:
                raise RuntimeError(f"the server ended with {self._process.returncode}")
            with (
                contextlib.suppress(OSError),
                urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer,  # noqa: S310 (our own server)
            ):
                if answer.status == 200:
                    return
            time.sleep(0.5)
        raise RuntimeError("the server did not come up")

    def tokens(self, prompt: str, count: int = TOKENS, timeout: float = 60.0) -> dict[str, Any]:
        body = {
            "text": prompt,
            "sampling_params": {"max_new_tokens": count, "temperature": 0, "ignore_eos": True},
        }
        status, text = self.post("/generate", body, timeout)
        if status != 200:
            raise RuntimeError(f"{status}: {text}")
        out = json.loads(text)
        return {"tokens": out["output_ids"], "version": out["meta_info"].get("weight_version")}

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(30)


@contextlib.contextmanager
def serving(checkpoint: Path, log: Path) -> Iterator[Server]:
    server = Server(checkpoint, log)
    try:
        server.await_health(600)
        yield server
    finally:
        server.close()


def told(call: Callable[[], object]) -> dict[str, Any]:
    """Return the error that a call raised, as fields."""
    try:
        call()
    except Exception as error:
        fields = ("tensor", "rank", "hint")
        found = {name: getattr(error, name, None) for name in fields}
        return found | {
            "kind": type(error).__name__,
            "text": str(error),
            "notes": getattr(error, "__notes__", []),
        }
    return {"kind": None}


def main() -> None:
    from syncline.adapters.sglang import SGLangInstance  # noqa: PLC0415
    from syncline.options import Options  # noqa: PLC0415

    out, a, b = map(Path, sys.argv[1:])
    options = Options(**JOB)
    seen: dict[str, Any] = {}
    with serving(b, out / "server.log") as server:
        say("served")
        seen["fresh"] = [server.tokens(prompt) for prompt in PROMPTS]

        with Writer(a, options, leave_out="model.norm.weight", job="short"):
            seen["short"] = told(
                lambda: SGLangInstance(server.url, instance="s", job="short", options=options)
            )
        seen["after_short"] = server.tokens(PROMPTS[0])
        say("a writer that lacks a tensor: refused")

        with Writer(a, options, job="served") as writer:
            early = Options(**(JOB | {"update_timeout": 1.0}))
            instance = SGLangInstance(server.url, instance="s", job="served", options=options, hold=True)
            instance._options = early
            seen["unpublished"] = told(instance.update)
            seen["held"] = instance.paused
            seen["asked"] = told(lambda: server.tokens(PROMPTS[0], timeout=3.0))
            instance._options = options
            instance.close()
            instance = SGLangInstance(server.url, instance="s", job="served", options=options)
            seen["goes_on"] = server.tokens(PROMPTS[0])
            writer.publish(1)

            seen["session"] = _with_session(server, instance)
            seen["in_place"] = _with_request(server, instance, "in_place")
            say("misuse: refused")
            seen["retract"] = _with_request(server, instance, "retract")
            seen["a"] = [server.tokens(prompt) for prompt in PROMPTS]
            instance.check_effective(a)
            seen["stale"] = told(lambda: instance.update(0))

            writer.load(b)
            writer.publish(2)
            seen["report"] = instance.update().as_dict()
            seen["b"] = [server.tokens(prompt) for prompt in PROMPTS]
            seen["wrong_checkpoint"] = told(lambda: instance.check_effective(a))
            instance.close()
        seen["alive"] = server.tokens(PROMPTS[0])
    (out / "misuse.json").write_text(json.dumps(seen))
    say("done")


def _with_session(server: Server, instance: Any) -> dict[str, Any]:
    """Update while somebody else has a weight-update session of SGLang open."""
    server.post("/begin_weight_update", {})
    found = told(instance.update)
    server.post("/end_weight_update", {})
    return found


def _with_request(server: Server, instance: Any, mode: str) -> dict[str, Any]:
    """Update while a long request runs, paused in one of SGLang's ways."""
    answer: dict[str, Any] = {}
    thread = threading.Thread(target=lambda: answer.update(server.tokens("a long story", 200, 120.0)))
    thread.start()
    time.sleep(0.4)
    instance._mode, kept = mode, instance._mode
    found = told(instance.update) | {"paused": instance.paused, "was_running": thread.is_alive()}
    instance._mode = kept
    thread.join(120)
    return found | {"answered": len(answer.get("tokens", ())), "version": answer.get("version")}


if __name__ == "__main__":
    main()
