"""From a published version to a checkpoint directory: the file tier reads like any other reader."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from syncline.errors import LayoutError, SynclineError, UnknownVersionError
from syncline.layout.dtensor import Storages
from syncline.layout.dtype import BY_CODE
from syncline.protocol import messages as m
from syncline.store.fetch import Fetcher, whole
from syncline.store.files import TensorEntry, save_checkpoint

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from syncline.layout import Layout
    from syncline.protocol.ids import Fence, VersionKey
    from syncline.store.member import Member


def save_version(
    member: Member,
    fence: Fence,
    table: str,
    key: VersionKey | None,
    directory: Path,
    *,
    base: Path | None = None,
    max_shard_bytes: int = 512 << 20,
) -> list[Path]:
    """Write a version as a Hugging Face checkpoint; see `syncline.store.files.save_checkpoint`.

    Args:
        member: this process; it must be able to map the writers' memory.
        fence: of one of its registrations.
        table: name of the table.
        key: the version; None: the newest that can be had.
        directory: appears whole, or not at all.
        base: a checkpoint directory whose side files are copied along.
        max_shard_bytes: upper bound of one file.

    Raises:
        UnknownVersionError: no such version can be read now.
        RevokedError: the version changed while it was read; nothing was written.
    """
    deadline = member.options.update_timeout
    pinned: m.Pinned = member.ask(m.Pin(fence, table, key, deadline))
    fetcher = Fetcher(member, fence)
    held = True
    try:
        described = _describe(fetcher.layout(pinned.writers))

        def fetch(names: Sequence[str]) -> dict[str, torch.Tensor]:
            device = "cpu" if member.device is None else f"cuda:{member.device}"
            tensors = {
                name: torch.empty(described[name][0], dtype=described[name][1], device=device)
                for name in names
            }
            storages = Storages()
            shards = [whole(name, t.shape, t, storages) for name, t in tensors.items()]
            fetcher.read(pinned.writers, shards, storages, deadline=deadline)
            return {name: tensor.cpu() for name, tensor in tensors.items()}

        def settle() -> None:
            nonlocal held
            held = False
            member.ask(m.Unpin(fence, table, pinned.key))  # raises if what was read may be torn

        entries = [
            TensorEntry(name, torch.Size(shape).numel() * dtype.itemsize)
            for name, (shape, dtype) in sorted(described.items())
        ]
        return save_checkpoint(
            directory,
            entries,
            fetch,
            max_shard_bytes=max_shard_bytes,
            metadata={"syncline_version": str(pinned.key)},
            base=base,
            before_rename=settle,
        )
    finally:
        if held:
            _let_go(member, fence, table, pinned.key)


def _let_go(member: Member, fence: Fence, table: str, key: VersionKey) -> None:
    try:
        member.ask(m.Unpin(fence, table, key))
    except SynclineError as error:
        error.add_note(f"while letting version {key} go")


def _describe(layout: Layout) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return global shape and dtype of every tensor that the writers hold, by name."""
    found: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for manifest in layout.manifests:
        dtypes = dict(zip(manifest.tensor.tolist(), manifest.dtype.tolist(), strict=True))
        for number, name in enumerate(manifest.names):
            if number not in dtypes:
                continue
            shape = tuple(manifest.global_shape[number, : int(manifest.ndim[number])].tolist())
            dtype = getattr(torch, BY_CODE[dtypes[number]].name)
            if found.setdefault(name, (shape, dtype)) != (shape, dtype):
                raise LayoutError(
                    "writers disagree on a tensor", tensor=name, expected=found[name], found=shape
                )
    if not found:
        raise UnknownVersionError("the version holds no tensors")
    return found
