"""The processes of the world, each with the memory that it has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from syncline.protocol.ids import VersionKey

if TYPE_CHECKING:
    from syncline.protocol.ids import Fence
    from syncline.protocol.parts import Mode

INITIAL = VersionKey(0, 0)  # what an engine holds before its first update


@dataclass(slots=True)
class WriterProc:
    rank: int
    process: str
    fence: Fence | None = None
    alive: bool = True
    holds: int = 1  # number of the version that live memory holds
    put: bool = False
    digested: bool = False
    closing: int | None = None


@dataclass(slots=True)
class WorkerProc:
    rank: int
    process: str
    fence: Fence | None = None
    alive: bool = True
    live: tuple[VersionKey, VersionKey] = (INITIAL, INITIAL)
    shadow: tuple[VersionKey, VersionKey] = (INITIAL, INITIAL)
    dirty: bool = False
    applied: VersionKey | None = None
    job: tuple[VersionKey, int, Mode] | None = None  # what to pull: key, attempt, mode
    halves: int = 0
    verified: bool = False
    apply: VersionKey | None = None
    moved: int = 0


@dataclass(slots=True)
class ControllerProc:
    process: str
    fence: Fence | None = None
    alive: bool = True
    begun: tuple[VersionKey, int, Mode, VersionKey | None] | None = None  # key, attempt, mode, from
    waiting: int | None = None
    mode: Mode = "in_place"
    nonce: int = 0
    committed: VersionKey | None = None


@dataclass(slots=True)
class InstanceProc:
    name: str
    controller: ControllerProc
    workers: list[WorkerProc]
    high: VersionKey | None = None  # newest commit that was ever answered, while any process lives
