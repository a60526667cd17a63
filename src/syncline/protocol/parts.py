"""What requests and replies are made of: the root of all messages, and the layouts and sources they name."""

from __future__ import annotations

from typing import Literal

import msgspec

Mode = Literal["in_place", "staged"]
Level = Literal["none", "delivered", "installed", "effective"]
Source = Literal["live", "snapshot"]
Until = Literal["drained", "pulled"]


class Message(msgspec.Struct, frozen=True, tag=True):
    """Root of what crosses the wire; subclasses are told apart by their name."""


class RankLayout(msgspec.Struct, frozen=True):
    """One rank as a planner sees it: fingerprint of its manifest (16 bytes), host, what its user allows."""

    manifest_fp: bytes
    host: str
    rules: bytes = b""


class InstanceLayout(msgspec.Struct, frozen=True):
    """One reader instance with all its ranks, rank 0 first."""

    name: str
    ranks: tuple[RankLayout, ...]


class WriterSource(msgspec.Struct, frozen=True):
    """Where one writer rank's shards of a version lie: manifest and binding by name, host, endpoint."""

    rank: int
    member: int
    manifest_fp: bytes
    host: str
    endpoint: str
    binding_generation: int
    binding_fp: bytes
    source: Source
    rules: bytes = b""
