"""Talking to the ranks with which blocks of scales are shared, over groups of two that nobody else uses."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from syncline.adapters.megatron import halo as halos
from syncline.adapters.megatron.exchange import exchange
from syncline.errors import AdapterError, DeadlineError, PeerLostError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from syncline.adapters.megatron.halo import Halo, Key, Lane

_TAG = 1


@dataclass(frozen=True, slots=True)
class _Peer:
    """A rank with which blocks are shared: a group of this one and that one."""

    group: Any
    other: int
    lane: Lane

    @property
    def tensor(self) -> str:
        """The first tensor that is spoken of, for errors."""
        return (self.lane.receives or self.lane.sends)[0].key[0]


class Neighbours:
    """The ranks with which one rank shares blocks. Making it is collective over all trainers.

    Args:
        halo: what this rank does.
        rank: of this process among the trainers.
        group: all trainers; it is used now, never later.
        timeout: seconds that a rank waits for another, now and in every round.

    Raises:
        DeadlineError: a rank did not answer; named, with a tensor whose blocks are shared with it.
    """

    def __init__(self, halo: Halo, rank: int, group: Any, timeout: float) -> None:
        self._halo, self._rank, self._timeout = halo, rank, timeout
        self._round, self._broken = 0, ""
        tokens = exchange(uuid.uuid4().bytes, group)
        self._peers: dict[int, _Peer] = {}
        # the lowest pair that is still to be made has both its ends ready for it: nobody waits in a circle
        for low, high in sorted((min(rank, other), max(rank, other)) for other in halo.lanes):
            other = high if low == rank else low
            name = f"syncline.halo.{tokens[low].hex()}.{low}.{high}"
            self._peers[other] = _Peer(self._pair(name, rank, other), int(rank == low), halo.lanes[other])

    def _pair(self, name: str, rank: int, other: int) -> Any:
        # Neither the class nor the default store has a public name; a group made by torch.distributed's own
        # function would be collective over the user's default group, and be numbered with the user's.
        gloo: Any = dist.ProcessGroupGloo
        store = distributed_c10d.PrefixStore(name, distributed_c10d._get_default_store())  # noqa: SLF001
        try:
            return gloo(store, int(rank > other), 2, timeout=timedelta(seconds=self._timeout))
        except RuntimeError as error:
            raise self._late(other, self._halo.lanes[other], error) from error

    def _late(self, other: int, lane: Lane, error: BaseException) -> DeadlineError:
        return DeadlineError(
            "a rank that shares blocks of scales did not answer",
            expected=f"writer {other} within {self._timeout:g} s",
            found=str(error).splitlines()[0],
            rank=f"writer {self._rank}",
            tensor=(lane.receives or lane.sends)[0].key[0],
            hint="every rank publishes after the same step; after this, make new adapters on all of them",
        )

    def round(self, values: Mapping[Key, NDArray[np.uint32]]) -> None:
        """Compare the largest magnitudes of shared blocks with those of all their holders, in place.

        Args:
            values: by held box, one a block that it touches; those in ``halo.shares`` at least.

        Raises:
            DeadlineError: a rank did not answer in time. Nothing is exchanged after that.
            PeerLostError: a rank is gone, or the exchange had failed before.
            AdapterError: a rank is in another round.
        """
        if self._broken:
            raise PeerLostError(
                "an exchange of scales failed before",
                found=self._broken,
                rank=f"writer {self._rank}",
                hint="make new adapters on all ranks",
            )
        self._round += 1
        try:
            self._tell(values)
        except Exception as error:
            self._broken = str(error).splitlines()[0]
            raise
        halos.merge(self._halo, values)

    def _tell(self, values: Mapping[Key, NDArray[np.uint32]]) -> None:
        limit = time.monotonic() + self._timeout
        works: list[tuple[_Peer, int, Any]] = []
        heard: dict[int, torch.Tensor] = {}
        kept: list[torch.Tensor] = []  # as long as they are being sent
        for other, peer in self._peers.items():
            if peer.lane.sends:
                told = halos.message(peer.lane.sends, values)
                kept.append(torch.from_numpy(np.insert(told, 0, self._round).view(np.int32)))
                works.append((peer, other, peer.group.send([kept[-1]], peer.other, _TAG)))
            if peer.lane.receives:
                count = sum(span.blocks.numel for span in peer.lane.receives)
                heard[other] = torch.zeros(count + 1, dtype=torch.int32)
                works.append((peer, other, peer.group.recv([heard[other]], peer.other, _TAG)))
        for peer, other, work in works:
            self._wait(work, peer, other, limit)
        for other, words in heard.items():
            self._compare(other, words.numpy().view(np.uint32), values)

    def _wait(self, work: Any, peer: _Peer, other: int, limit: float) -> None:
        try:
            work.wait(timedelta(seconds=max(limit - time.monotonic(), 0.001)))
        except RuntimeError as error:
            if time.monotonic() >= limit - 0.01:
                raise self._late(other, peer.lane, error) from error
            raise PeerLostError(
                "a rank that shares blocks of scales is gone",
                expected=f"writer {other}",
                found=str(error).splitlines()[0],
                rank=f"writer {self._rank}",
                tensor=peer.tensor,
                hint="make new adapters on all ranks",
            ) from error

    def _compare(
        self, other: int, words: NDArray[np.uint32], values: Mapping[Key, NDArray[np.uint32]]
    ) -> None:
        lane = self._peers[other].lane
        if int(words[0]) != self._round:
            raise AdapterError(
                "ranks that share blocks of scales are in different rounds",
                expected=f"round {self._round}",
                found=f"round {int(words[0])} of writer {other}",
                rank=f"writer {self._rank}",
                tensor=lane.receives[0].key[0],
                hint="every rank publishes as often as every other; make new adapters on all of them",
            )
        halos.compare(lane.receives, values, words[1:])
