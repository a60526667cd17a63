"""Errors on their way through vLLM, which passes on an exception's text: the error travels inside it."""

from __future__ import annotations

import json
import re

from syncline.errors import SynclineError, from_wire, to_wire

_MARK = re.compile(r"\[syncline-error:(?P<fields>[0-9a-f]+)\]")


class CarriedError(SynclineError):
    """An error whose text holds the original one whole; `unpack` returns that.

    Args:
        error: the original.
        trace: its traceback, for errors of other libraries.
    """

    def __init__(self, error: BaseException, trace: str | None = None) -> None:
        fields = to_wire(error, trace)
        packed = json.dumps(fields).encode().hex()
        super().__init__(f"{error} [syncline-error:{packed}]")


def unpack(text: str) -> SynclineError | None:
    """Return the error that a text carries, wherever in it; None if it carries none."""
    found = _MARK.search(text)
    if found is None:
        return None
    try:
        fields = json.loads(bytes.fromhex(found["fields"]))
    except ValueError:
        return None
    return from_wire(fields) if isinstance(fields, dict) else None
