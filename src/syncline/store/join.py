"""How the processes of a job join a table, and how one that cannot says so."""

from __future__ import annotations

import logging
import secrets
import traceback
from typing import TYPE_CHECKING

import msgspec

from syncline.errors import SynclineError, to_wire
from syncline.protocol import messages as m

if TYPE_CHECKING:
    from syncline.layout import Manifest
    from syncline.protocol.ids import Fence
    from syncline.store.adapter import EngineAdapter
    from syncline.store.member import Member

logger = logging.getLogger(__name__)

_PATIENCE = 5.0  # seconds for a farewell to whoever waits


def as_writer(
    member: Member, table: str, manifest: Manifest, *, rank: int, world: int, rules: bytes = b""
) -> Fence:
    """Register this process as writer ``rank`` of ``world``; ``rules`` as `syncline.store.rules` encodes."""
    request = m.RegisterWriter(
        table=table,
        rank=rank,
        world=world,
        manifest_fp=manifest.fingerprint,
        host=member.host,
        endpoint=member.endpoint.to_text(),
        process="",
        options=_agreed(member),
        rules=rules,
    )
    return member.client.register(request, manifest).fence


def as_reader(member: Member, table: str, instance: str, adapter: EngineAdapter, rules: bytes) -> Fence:
    """Register this process as the rank of a reader instance that ``adapter`` is."""
    request = msgspec.structs.replace(
        _reader(member, table, instance, adapter.world),
        rank=adapter.rank,
        manifest_fp=adapter.manifest.fingerprint,
        options=_agreed(member),
        rules=rules,
    )
    return member.client.register(request, adapter.manifest).fence


def as_controller(member: Member, table: str, instance: str, world: int) -> m.Registered:
    """Register this process as the controller of a reader instance of ``world`` ranks."""
    request = _reader(member, table, instance, world)
    return member.client.register(msgspec.structs.replace(request, options=_agreed(member)))


def as_guest(member: Member, table: str, name: str) -> Fence:
    """Register this process as one that is in no plan: it may look, pin and fetch.

    Guests are instances without ranks; ``name`` tells what for, and gets an ending of its own.
    """
    request = _reader(member, table, f"{name}-{secrets.token_hex(6)}", 1)
    return member.client.register(request).fence


def decline(member: Member, table: str, who: str, error: BaseException, instance: str | None = None) -> None:
    """Tell the others why this process will never come, so that nobody waits for it."""
    fields = to_wire(error, "".join(traceback.format_exception(error)))
    try:
        member.ask(m.JoinFailed(table, who, fields, instance), _PATIENCE)
    except SynclineError as unheard:
        logger.warning("nobody heard that %s cannot join: %s", who, unheard.what)


def _reader(member: Member, table: str, instance: str, world: int) -> m.RegisterReader:
    return m.RegisterReader(
        table=table,
        instance=instance,
        rank=-1,
        world=world,
        manifest_fp=b"",
        host=member.host,
        endpoint=member.endpoint.to_text(),
        process="",
    )


def _agreed(member: Member) -> dict[str, str]:
    """Return the settings on which all members of a table must agree."""
    return {"transport": member.options.transport}
