"""Two ways into an SGLang engine: the ``Engine`` of this process, and a server by its URL. Same verbs."""

from __future__ import annotations

import asyncio
import base64
import json
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any, Literal, Protocol

from syncline.adapters.sglang.commands import FORMAT
from syncline.adapters.sglang.srt import srt
from syncline.errors import AdapterError, DeadlineError, PeerLostError

if TYPE_CHECKING:
    from collections.abc import Coroutine

_REQUESTS = "managers.io_struct"

Pause = Literal["abort", "retract", "in_place"]
"""What a pause does to running requests: end them; put them back into the queue, their caches dropped; keep
them as they are."""


class Door(Protocol):
    """What an instance's user asks of an engine. Every verb has a deadline in seconds."""

    def pause(self, mode: Pause, deadline: float) -> None:
        """Stop forward passes."""
        ...

    def resume(self, deadline: float) -> None:
        """Let them run again."""
        ...

    def command(self, payload: bytes, deadline: float) -> str:
        """Send a command to every rank; return rank 0's answer, or whatever the engine said instead."""
        ...

    def report_version(self, version: str, deadline: float) -> None:
        """Say which version is served from now on."""
        ...


class EngineDoor:
    """An ``sglang.Engine`` in this process.

    Args:
        engine: it; another thread may be generating with it.
    """

    def __init__(self, engine: Any) -> None:
        self._engine, self._manager = engine, engine.tokenizer_manager

    def pause(self, mode: Pause, deadline: float) -> None:
        """See `Door`."""
        self._run(
            self._manager.pause_generation(srt(_REQUESTS).PauseGenerationReqInput(mode=mode)),
            deadline,
            "pause",
        )

    def resume(self, deadline: float) -> None:
        """See `Door`."""
        request = srt(_REQUESTS).ContinueGenerationReqInput(torch_empty_cache=False)
        self._run(self._manager.continue_generation(request), deadline, "continue")

    def command(self, payload: bytes, deadline: float) -> str:
        """See `Door`."""
        request = srt(_REQUESTS).UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=[payload], load_format=FORMAT, flush_cache=True
        )
        sent = self._manager.update_weights_from_tensor(request, None)
        _, message = self._run(sent, deadline, "answer a command")
        return message

    def report_version(self, version: str, deadline: float) -> None:
        """See `Door`."""
        request = srt(_REQUESTS).UpdateWeightVersionReqInput(new_version=version, abort_all_requests=False)
        self._run(self._manager.update_weight_version(request), deadline, "take a version's name")

    def _run(self, work: Coroutine[Any, Any, Any], deadline: float, what: str) -> Any:
        """Run a coroutine in the engine's loop, which another thread may be running already."""
        loop = self._engine.loop
        bounded = asyncio.wait_for(work, deadline)
        try:
            if loop.is_running():
                return asyncio.run_coroutine_threadsafe(bounded, loop).result()
            return loop.run_until_complete(bounded)
        except TimeoutError as error:
            raise _late(what, deadline) from error


class ServerDoor:
    """An SGLang server by its URL.

    Args:
        url: such as ``http://127.0.0.1:30000``.
        key: its API or admin key, if it has one.
    """

    def __init__(self, url: str, key: str | None = None) -> None:
        self._url, self._key = url.rstrip("/"), key
        if not self._url.startswith(("http://", "https://")):
            raise AdapterError("not the URL of a server", expected="http://HOST:PORT", found=url)

    def pause(self, mode: Pause, deadline: float) -> None:
        """See `Door`."""
        self._must("/pause_generation", {"mode": mode}, deadline)

    def resume(self, deadline: float) -> None:
        """See `Door`."""
        self._must("/continue_generation", {"torch_empty_cache": False}, deadline)

    def command(self, payload: bytes, deadline: float) -> str:
        """See `Door`."""
        body = {
            "serialized_named_tensors": [base64.b64encode(payload).decode()],
            "load_format": FORMAT,
            "flush_cache": True,
        }
        _, text = self._post("/update_weights_from_tensor", body, deadline)
        try:
            return str(json.loads(text)["message"])
        except (ValueError, KeyError, TypeError):
            return text

    def report_version(self, version: str, deadline: float) -> None:
        """See `Door`."""
        body = {"new_version": version, "abort_all_requests": False}
        self._must("/update_weight_version", body, deadline)

    def _must(self, path: str, body: dict[str, object], deadline: float) -> None:
        status, text = self._post(path, body, deadline)
        if status != 200:
            raise AdapterError(
                f"the server refused {path}", expected="status 200", found=f"status {status}: {text[:500]}"
            )

    def _post(self, path: str, body: dict[str, object], deadline: float) -> tuple[int, str]:
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        request = urllib.request.Request(  # noqa: S310 (the scheme was checked)
            self._url + path, json.dumps(body).encode(), headers, method="POST"
        )
        try:
            with urllib.request.urlopen(request, timeout=deadline) as answer:  # noqa: S310
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode(errors="replace")
        except TimeoutError as error:
            raise _late(path, deadline) from error
        except urllib.error.URLError as error:
            if isinstance(error.reason, TimeoutError):
                raise _late(path, deadline) from error
            raise PeerLostError("the server cannot be reached", found=error.reason, rank=self._url) from error


def _late(what: str, deadline: float) -> DeadlineError:
    return DeadlineError(f"waited {deadline:g} s for the engine to {what}")
