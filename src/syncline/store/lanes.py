"""Which transport moves bytes between two processes, and where an adapter's weights lie.

Both ends come to the same answer on their own: from the two endpoints, and the job's ``transport`` option.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncline.errors import TransportError

if TYPE_CHECKING:
    from syncline.transport.base import Endpoint

ONE_SIDED = frozenset({"shm", "cuda_ipc"})
"""Transports by which a reader pulls on its own; over the others the writer sends."""
_OF_HOSTS = ("shm", "gloo")
_OF_DEVICES = ("cuda_ipc", "nccl")


def device_of(adapter: object) -> int | None:
    """Return the index of the CUDA device that an adapter's live tensors lie on; None: host memory."""
    found = getattr(adapter, "device", None)
    return found.index if found is not None and found.type == "cuda" else None


def lane_of(source: Endpoint, destination: Endpoint, only: str | None) -> str:
    """Return the name of the transport from a writer rank to a reader rank.

    Args:
        source: of the writer.
        destination: of the reader.
        only: the transport that the job is told to use; None: mapped memory on one host, messages otherwise.

    Raises:
        TransportError: one holds its weights on a GPU and the other in host memory, or ``only`` does not move
            such memory.
    """
    on_device = [_OF_DEVICES[0] in end.addresses for end in (source, destination)]
    if on_device[0] != on_device[1]:
        places = ["a GPU" if there else "host memory" for there in on_device]
        raise TransportError(
            f"no transport from {source} to {destination}",
            expected="weights of both on GPUs, or of both in host memory",
            found=f"{places[0]} and {places[1]}",
            hint="load the engine on a GPU, or keep the trainer's weights in host memory",
        )
    offered = _OF_DEVICES if on_device[0] else _OF_HOSTS
    if only is None:
        return offered[0] if _reachable(source, destination) else offered[1]
    if only not in offered:
        raise TransportError(
            f"the transport {only!r} does not move such memory",
            expected=" or ".join(offered),
            found="weights on GPUs" if on_device[0] else "weights in host memory",
            hint="set SYNCLINE_TRANSPORT, or Options.transport, alike everywhere",
        )
    return only


def _reachable(source: Endpoint, destination: Endpoint) -> bool:
    """Whether the reader can map the writer's memory, as far as the two endpoints tell."""
    if source.host != destination.host:
        return False
    cards = [end.addresses.get("nccl") for end in (source, destination)]
    if not cards[0] or not cards[1]:
        return True
    from syncline.transport.nccl_card import Card  # noqa: PLC0415 - only where there are GPUs

    return Card.decode(cards[0]).device not in Card.decode(cards[1]).apart
