"""What travels between an instance's user and the ranks of its engine: JSON, typed, in both directions."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from syncline.errors import ProtocolError, SynclineError, from_wire

MAX_BYTES = 1 << 20
"""Largest command that is read."""

FORMAT = "syncline"
"""The ``load_format`` by which an SGLang request says that it carries one of these commands."""


class RulesText(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`syncline.layout.Rules` as JSON."""

    casts: dict[str, str] | Literal["reader"] = {}
    frozen: tuple[str, ...] = ()
    extras: tuple[str, ...] = ()
    aliases: dict[str, str] = {}


class Join(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="join"):
    """Learn the layout, and register as an instance of a job.

    Attributes:
        instance: its name.
        job: name of the job.
        table: name of the table.
        rules: what the instance allows.
        options: fields of `syncline.options.Options` that differ from the environment of the ranks.
        check: wait for the writers, and refuse at once if they cannot feed this instance.
        frozen_draft: leave a draft model as it is.
        twin_check: prove the layout by the engine's own loader, once on a host: `syncline.adapters.checked`.
        verify_every: as `syncline.store.reader.WeightReader` takes it.
    """

    instance: str
    job: str = "default"
    table: str = "weights"
    rules: RulesText = RulesText()
    options: dict[str, int | float | str] = {}
    check: bool = True
    frozen_draft: bool = False
    twin_check: bool = True
    verify_every: int = 1


class Update(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="update"):
    """Bring the instance to a version; see `syncline.store.reader.WeightReader.update`."""

    version: int | None = None
    timeout: float | None = None
    verify: Literal["none", "delivered", "installed"] = "delivered"


class Describe(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="describe"):
    """List every live tensor of every rank."""


class Explain(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="explain"):
    """Say of every live tensor of every rank what it is. Needs no `Join`.

    Attributes:
        directory: the checkpoint that the engine was started from.
        local: patterns of tensors that no checkpoint tensor fills and that stay as they are.
    """

    directory: str
    local: tuple[str, ...] = ()


class Effective(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="effective"):
    """Compare every live tensor with a fresh load of a checkpoint directory by the engine's own loader."""

    directory: str


class Dump(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="dump"):
    """Write the live tensors of every rank as ``rank-<n>.safetensors`` into a directory. Needs no `Join`."""

    directory: str


class Leave(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="leave"):
    """Leave the job; the engine keeps what it has."""


Command = Join | Update | Describe | Explain | Effective | Dump | Leave


class Reply(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one rank, or rank 0 for all of them, answers.

    Attributes:
        error: as `syncline.errors.to_wire` writes it; None: all went well.
        notes: what was added to the error on its way.
        hold: whether the engine must stay paused: it may hold a mixture of versions, or caches of an old one.
        result: by command: an update's report, the description, nothing.
    """

    error: dict[str, str | None] | None = None
    notes: tuple[str, ...] = ()
    hold: bool = False
    result: Any = None


_encoder = msgspec.json.Encoder()
_commands = msgspec.json.Decoder(Command)
_replies = msgspec.json.Decoder(Reply)


def encode(message: Command | Reply) -> bytes:
    """Return a command or a reply as JSON."""
    return _encoder.encode(message)


def decode_command(data: bytes) -> Command:
    """Decode `encode`.

    Raises:
        ProtocolError: no command, or one larger than `MAX_BYTES`.
    """
    if len(data) > MAX_BYTES:
        raise ProtocolError("a command larger than any sensible one", expected=MAX_BYTES, found=len(data))
    try:
        return _commands.decode(data)
    except msgspec.MsgspecError as error:
        raise ProtocolError("bytes that are not a command", found=error) from error


def decode_reply(data: bytes | str) -> Reply:
    """Decode `encode`.

    Raises:
        ProtocolError: no reply: the engine answered something of its own; the text is in the message.
    """
    try:
        return _replies.decode(data)
    except msgspec.MsgspecError as error:
        text = data if isinstance(data, str) else data.decode(errors="replace")
        raise ProtocolError(
            "the engine did not answer as syncline's plug-in would",
            expected="a reply of the plug-in in every scheduler process",
            found=text[:2000],
            hint="install syncline in the engine's environment; SGLANG_PLUGINS, if set, must name it",
        ) from error


def error_of(reply: Reply) -> SynclineError | None:
    """Return the error of a reply as the exception it was, notes included."""
    if reply.error is None:
        return None
    error = from_wire(reply.error)
    for note in reply.notes:
        error.add_note(note)
    return error
