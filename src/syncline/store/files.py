"""The file tier: a version as sharded safetensors in checkpoint names, which any Hugging Face loader opens.

The directory appears at once and whole: everything is written and flushed beside it, then renamed. Memory is
bounded by one shard file.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

from safetensors.torch import save_file

from syncline import faults
from syncline.errors import LayoutError, MemoryBudgetError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    import torch

    Fetch = Callable[[Sequence[str]], Mapping[str, torch.Tensor]]

INDEX_NAME = "model.safetensors.index.json"
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One checkpoint tensor to be written: its name and its size in bytes."""

    name: str
    nbytes: int


def save_checkpoint(
    directory: Path,
    entries: Sequence[TensorEntry],
    fetch: Fetch,
    *,
    max_shard_bytes: int = 512 << 20,
    metadata: Mapping[str, str] | None = None,
    base: Path | None = None,
    before_rename: Callable[[], None] = lambda: None,
) -> list[Path]:
    """Write ``entries`` as a Hugging Face checkpoint directory.

    Args:
        directory: appears when everything is on disk; an existing directory there is replaced as a whole.
        entries: all tensors, in the order in which they are written.
        fetch: returns whole, contiguous CPU tensors for some names; called once a shard file.
        max_shard_bytes: upper bound of one file, unless a single tensor is larger.
        metadata: strings for the header of each file, such as the version.
        base: a checkpoint directory whose configuration and tokenizer files are copied along.
        before_rename: called when all is read and written; if it raises, nothing appears.

    Returns:
        The files written, in order.

    Raises:
        LayoutError: nothing to write, or a name twice.
        MemoryBudgetError: the disk has less room than the bytes to write.
    """
    _check(directory, entries)
    partial = directory.with_name(f".{directory.name}.partial-{os.getpid()}")
    partial.mkdir(parents=True)
    try:
        if base is not None:
            _copy_side_files(base, partial)
        groups = _group(entries, max_shard_bytes)
        names = _write_shards(partial, groups, fetch, {"format": "pt", **(metadata or {})})
        if len(groups) > 1:
            _write_index(partial, groups, names)
        _sync_directory(partial)
        faults.point("files.before_rename")
        before_rename()
        _replace(partial, directory)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return [directory / name for name in names]


def _check(directory: Path, entries: Sequence[TensorEntry]) -> None:
    if not entries:
        raise LayoutError("there is nothing to write", expected="at least one tensor", found="none")
    names = [entry.name for entry in entries]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise LayoutError("a tensor would be written twice", tensor=twice)
    directory.parent.mkdir(parents=True, exist_ok=True)
    need, free = sum(entry.nbytes for entry in entries), shutil.disk_usage(directory.parent).free
    if need > free:
        raise MemoryBudgetError(
            f"the disk of {directory.parent} is too full for this checkpoint",
            expected=f"{need} bytes free",
            found=f"{free} bytes",
        )


def _group(entries: Sequence[TensorEntry], max_shard_bytes: int) -> list[list[TensorEntry]]:
    groups: list[list[TensorEntry]] = [[]]
    filled = 0
    for entry in entries:
        if groups[-1] and filled + entry.nbytes > max_shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(entry)
        filled += entry.nbytes
    return groups


def _write_shards(
    partial: Path, groups: Sequence[Sequence[TensorEntry]], fetch: Fetch, metadata: dict[str, str]
) -> list[str]:
    written: list[str] = []
    for number, group in enumerate(groups, 1):
        name = _shard_name(number, len(groups))
        tensors = fetch([entry.name for entry in group])
        faults.point("files.before_shard")
        save_file(dict(tensors), partial / name, metadata=metadata)
        _sync_file(partial / name)
        written.append(name)
    return written


def _shard_name(number: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"


def _write_index(partial: Path, groups: Sequence[Sequence[TensorEntry]], names: Sequence[str]) -> None:
    weight_map = {entry.name: name for group, name in zip(groups, names, strict=True) for entry in group}
    total = sum(entry.nbytes for group in groups for entry in group)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    path = partial / INDEX_NAME
    path.write_text(json.dumps(index, indent=2))
    _sync_file(path)


def _copy_side_files(base: Path, partial: Path) -> None:
    for path in sorted(base.iterdir()):
        if path.is_file() and not path.name.endswith(_WEIGHT_SUFFIXES):
            shutil.copy2(path, partial / path.name)


def _replace(partial: Path, directory: Path) -> None:
    """Put ``partial`` in the place of ``directory``; an old one is moved aside first, then removed."""
    if not directory.exists():
        partial.rename(directory)
    else:
        old = directory.with_name(f".{directory.name}.old-{os.getpid()}")
        directory.rename(old)
        partial.rename(directory)
        shutil.rmtree(old)
    _sync_directory(directory.parent)


def _sync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_directory(path: Path) -> None:
    _sync_file(path)
