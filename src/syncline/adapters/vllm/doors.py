"""The two ways to vLLM's control verbs: an ``LLM`` in this process, or a server by its URL."""

from __future__ import annotations

import inspect
import json
import urllib.error
import urllib.parse
import urllib.request
from typing import Any, Literal, Protocol

from syncline.adapters.vllm.carry import unpack
from syncline.errors import AdapterError, DeadlineError, PeerLostError, RemoteError

LEAVE = "leave"
"""An update that is none: the engine leaves its job."""

VLLMPause = Literal["abort", "wait", "keep"]
"""vLLM's own: cut running requests, let them end, or freeze them and go on after the update."""


class Door(Protocol):
    """vLLM's verbs of an update. Deadlines are in seconds."""

    def initialise(self, info: dict[str, Any], deadline: float) -> None:
        """Join a job."""

    def pause(self, mode: VLLMPause, deadline: float) -> None:
        """Return when no request is being processed; raises `DeadlineError` if some still are."""

    def update(self, info: dict[str, Any], deadline: float) -> None:
        """Start an update and run it."""

    def finish(self, version: str | None, deadline: float) -> None:
        """End an update; requests carry ``version`` from then on."""

    def reset_caches(self, deadline: float) -> None:
        """Drop everything that was computed with old weights."""

    def resume(self, deadline: float) -> None:
        """Process requests again."""

    def version(self, deadline: float) -> str:
        """Return the version that vLLM reports."""
        ...

    def leave(self, deadline: float) -> None:
        """Leave the job."""


class LLMDoor:
    """An ``LLM`` in this process, with its engine in this process or in another one."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def initialise(self, info: dict[str, Any], deadline: float) -> None:
        """See `Door`."""
        self._call("init_weight_transfer_engine", {"init_info": info})

    def pause(self, mode: VLLMPause, deadline: float) -> None:
        """See `Door`. Between calls of ``generate`` nothing runs; requests that were added by hand may."""
        if mode == "wait":
            if self._llm.llm_engine.has_unfinished_requests():
                raise DeadlineError(
                    "requests are unfinished, and nobody processes them while this process waits",
                    hint='finish them first, or pause with "keep" or "abort"',
                )
            mode = "keep"
        self._call("sleep", level=0, mode=mode)

    def update(self, info: dict[str, Any], deadline: float) -> None:
        """See `Door`."""
        self._call("start_weight_update")
        self._call("update_weights", {"update_info": info})

    def finish(self, version: str | None, deadline: float) -> None:
        """See `Door`. Where vLLM's own verb takes no version, its answers carry none."""
        takes = inspect.signature(self._llm.finish_weight_update).parameters
        self._call("finish_weight_update", *((version,) if takes else ()))

    def reset_caches(self, deadline: float) -> None:
        """See `Door`."""
        if not self._call("reset_prefix_cache", reset_running_requests=True):
            raise _refused()
        self._call("reset_mm_cache")
        self._llm.llm_engine.reset_encoder_cache()

    def resume(self, deadline: float) -> None:
        """See `Door`."""
        self._call("wake_up", tags=["scheduling"])

    def version(self, deadline: float) -> str:
        """See `Door`."""
        return str(self._call("get_weight_version"))

    def leave(self, deadline: float) -> None:
        """See `Door`."""
        if hasattr(self._llm, "shutdown_weight_transfer_engine"):
            self._call("shutdown_weight_transfer_engine")
        else:
            self.update({"verify": LEAVE}, deadline)
            self.finish(None, deadline)

    def _call(self, verb: str, *arguments: Any, **options: Any) -> Any:
        try:
            return getattr(self._llm, verb)(*arguments, **options)
        except Exception as error:
            raise _carried(error, str(error), verb) from error


class HTTPDoor:
    """A vLLM server that was started with ``VLLM_SERVER_DEV_MODE=1``, by its URL.

    Args:
        url: ``http://host:port``.
        token: the server's API key, if it has one.
    """

    def __init__(self, url: str, token: str | None = None) -> None:
        if urllib.parse.urlsplit(url).scheme not in {"http", "https"}:
            raise AdapterError("not the URL of a server", expected="http://host:port", found=url)
        self._url, self._token = url.rstrip("/"), token

    def initialise(self, info: dict[str, Any], deadline: float) -> None:
        """See `Door`."""
        self._post("/init_weight_transfer_engine", {"init_info": info}, deadline)

    def pause(self, mode: VLLMPause, deadline: float) -> None:
        """See `Door`."""
        try:
            self._post(f"/pause?mode={mode}&clear_cache=false", None, deadline)
        except DeadlineError as error:
            self.resume(deadline)
            raise DeadlineError(
                f"the server still processes requests after {deadline:g} s",
                expected="all of them finished",
                found=f"pause mode {mode!r}",
                hint='they go on; raise the timeout, or pause with "keep" or "abort"',
            ) from error

    def update(self, info: dict[str, Any], deadline: float) -> None:
        """See `Door`."""
        self._post("/start_weight_update", None, deadline)
        self._post("/update_weights", {"update_info": info}, deadline)

    def finish(self, version: str | None, deadline: float) -> None:
        """See `Door`."""
        self._post("/finish_weight_update", {"weight_version": version}, deadline)

    def reset_caches(self, deadline: float) -> None:
        """See `Door`."""
        answer = self._post("/reset_prefix_cache?reset_running_requests=true", None, deadline)
        if not answer.get("success"):
            raise _refused()
        self._post("/reset_mm_cache", None, deadline)
        self._post("/reset_encoder_cache", None, deadline)

    def resume(self, deadline: float) -> None:
        """See `Door`."""
        self._post("/resume", None, deadline)

    def version(self, deadline: float) -> str:
        """See `Door`."""
        return str(self._ask("GET", "/weight_info", None, deadline).get("weight_version"))

    def leave(self, deadline: float) -> None:
        """See `Door`."""
        try:
            self._post("/shutdown_weight_transfer_engine", None, deadline)
        except RemoteError:  # vLLM did not always have it
            self.update({"verify": LEAVE}, deadline)
            self.finish(None, deadline)

    def _post(self, path: str, body: dict[str, Any] | None, deadline: float) -> dict[str, Any]:
        return self._ask("POST", path, body, deadline)

    def _ask(self, method: str, path: str, body: dict[str, Any] | None, deadline: float) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"}
        if self._token is not None:
            headers["Authorization"] = f"Bearer {self._token}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, headers, method=method)  # noqa: S310 (checked above)
        try:
            with urllib.request.urlopen(request, timeout=max(deadline, 0.1)) as reply:  # noqa: S310 (as above)
                text = reply.read().decode()
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")
            raise _carried(error, text, f"{method} {path}", _hint(error.code)) from error
        except TimeoutError as error:
            raise DeadlineError(f"{self._url}{path} did not answer within {deadline:g} s") from error
        except OSError as error:
            if isinstance(getattr(error, "reason", None), TimeoutError):
                raise DeadlineError(f"{self._url}{path} did not answer within {deadline:g} s") from error
            raise PeerLostError("the server cannot be reached", found=error, rank=self._url) from error
        return _object(text)


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text) if text.strip() else {}
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _hint(status: int) -> str | None:
    missing = "start the server with VLLM_SERVER_DEV_MODE=1 and --weight-transfer-config"
    return missing if status in {404, 405} else None


def _carried(error: Exception, text: str, verb: str, hint: str | None = None) -> Exception:
    """Return the error of syncline that an answer carries; else the answer itself."""
    found = unpack(text)
    if found is not None:
        return found
    return RemoteError(f"vLLM failed in {verb}: {type(error).__name__}", found=text[:2000], hint=hint)


def _refused() -> AdapterError:
    return AdapterError(
        "vLLM did not reset its prefix cache",
        expected="every block free, as running requests are put back",
        hint="the instance stays paused: its cache still holds keys and values of the old weights",
    )
