"""Names that every message carries: who speaks (`Fence`) and which state is meant (`VersionKey`)."""

from __future__ import annotations

import hashlib

import msgspec


class Fence(msgspec.Struct, frozen=True):
    """Who speaks, and under which authority; a superseded fence changes nothing.

    Attributes:
        job: name of the job.
        boot: boot number of the MetaServer that gave the fence; a restart takes a new one.
        epoch: incarnation of the table's writers; 0 for a reader.
        member: number of the registration, unique within a boot.
        attempt: update attempt of an instance, 0 outside an update. Attempts grow over instances and boots.
    """

    job: str
    boot: int
    epoch: int
    member: int
    attempt: int = 0

    def at(self, attempt: int) -> Fence:
        """Return this fence for one update attempt: what tickets and transfers carry."""
        return Fence(self.job, self.boot, self.epoch, self.member, attempt)


class VersionKey(msgspec.Struct, frozen=True, order=True):
    """One version of a table, ordered by (epoch, number): a newer epoch is newer whatever its number.

    Attributes:
        epoch: incarnation of the writers that published it, from 1.
        number: the writers' own number (a step), growing within the epoch, from 0.
    """

    epoch: int
    number: int

    def __str__(self) -> str:
        return f"{self.epoch}.{self.number}"


def blob_name(blob: bytes) -> bytes:
    """Return the 16 bytes by which stored bytes are fetched: their blake2b hash."""
    return hashlib.blake2b(blob, digest_size=16).digest()
