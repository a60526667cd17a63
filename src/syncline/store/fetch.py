"""Reads parts of a version into tensors of this process, without being an instance: for tables and files."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np

from syncline.layout import Box, Layout, Rules
from syncline.layout.manifest import Manifest
from syncline.layout.shard import Shard
from syncline.layout.view import View
from syncline.memory import Binding
from syncline.plan import plan
from syncline.protocol.ids import Fence
from syncline.store import rules as rules_wire
from syncline.store.pull import Puller

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch

    from syncline.layout.dtensor import Storages
    from syncline.protocol.parts import WriterSource
    from syncline.store.member import Member

_NAME = "fetch"


class Fetcher:
    """Pulls boxes of a version's tensors into given memory.

    Args:
        member: the process.
        fence: of one of its registrations; manifests are fetched under it.
    """

    def __init__(self, member: Member, fence: Fence) -> None:
        self._member, self._fence = member, fence
        self._puller = Puller(member, fence, "shm" if member.device is None else "cuda_ipc")
        self._generation = itertools.count(1)

    def layout(self, places: Sequence[WriterSource]) -> Layout:
        """Return the writers' layout of a version."""
        manifests = tuple(self._member.client.get_manifest(self._fence, p.manifest_fp) for p in places)
        return Layout(manifests, tuple(p.host for p in places))

    def read(
        self,
        places: Sequence[WriterSource],
        shards: Iterable[Shard],
        storages: Storages,
        *,
        deadline: float,
        allowed: Rules | None = None,
    ) -> int:
        """Fill ``shards``, whose views number ``storages``, from a pinned version; return the bytes moved.

        Raises:
            NameMismatchError, ShapeMismatchError, UndeclaredCastError, CoverageError: the version has no such
                boxes; nothing was written.
            TransportError: a holder cannot be reached.
        """
        writer = self.layout(places)
        manifest = Manifest.from_shards(shards, [s.nbytes() for s in storages.listed])
        rules = rules_wire.merge(
            [Rules(extras=("*",)), allowed or Rules(), *(rules_wire.decode(p.rules) for p in places)]
        )
        made = plan(writer, {_NAME: Layout((manifest,), (self._member.host,))}, rules)
        addresses = np.array([s.data_ptr() for s in storages.listed], np.int64)
        local = Binding.private(manifest.fingerprint, addresses, next(self._generation))
        route = self._puller.route(made, _NAME, 0, places)
        fence = Fence(self._member.job, self._member.client.boot, 0, self._fence.member)
        self._puller.bind(route, places, local, fence, deadline)
        return self._puller.run(route.legs[0], fence, deadline, digest=False).nbytes


def whole(name: str, shape: Sequence[int], tensor: torch.Tensor, storages: Storages) -> Shard:
    """Return the shard that fills ``tensor`` with all of a checkpoint tensor of this shape."""
    return part(name, shape, (0,) * len(shape), tensor, storages)


def part(
    name: str, shape: Sequence[int], offset: Sequence[int], tensor: torch.Tensor, storages: Storages
) -> Shard:
    """Return the shard that fills ``tensor`` with a box, of its own sizes, of a checkpoint tensor."""
    view = View.simple(
        storages.number(tensor), int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride()
    )
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Shard(name, tuple(shape), dtype, Box(tuple(offset), tuple(tensor.shape)), view)
