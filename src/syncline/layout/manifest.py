"""Manifests: all shards of one rank, address-free, columnar, immutable, with a content fingerprint."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from syncline.errors import LayoutError, ManifestError, ShapeMismatchError
from syncline.layout import check, codec, hashing, overlap, segments
from syncline.layout.box import Box
from syncline.layout.columns import Columns
from syncline.layout.dtype import BY_CODE, code
from syncline.layout.names import NameTable, current
from syncline.layout.segments import Segments, expand
from syncline.layout.shard import Shard
from syncline.layout.view import View

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from typing import Any

    from numpy.typing import ArrayLike

    from syncline.layout.columns import I32, I64, U8
    from syncline.layout.hashing import U64
    from syncline.layout.names import NamePool

__all__ = ["Layout", "Manifest", "Segments"]

FINGERPRINT_BYTES = 16


@dataclass(frozen=True, eq=False)
class Manifest(Columns):
    """All shards of one rank. The columns are described at `Columns`; build one by a classmethod.

    There is no rank and no address inside: ranks that hold the same, such as those of identical instances,
    have equal manifests, and moving a storage changes nothing. Manifests are equal when fingerprints are.
    """

    @classmethod
    def from_shards(cls, shards: Iterable[Shard], storage_nbytes: Sequence[int]) -> Manifest:
        """Build a manifest.

        Args:
            shards: in any order.
            storage_nbytes: size in bytes of every storage that the views number.

        Raises:
            ShapeMismatchError: one name, two global shapes.
            LayoutError: a box outside of its tensor, a view outside of its storage, the same box of a name
                twice, an unknown dtype, a size beyond 2^62.
        """
        listed = list(shards)
        try:
            return cls._from_list(listed, storage_nbytes)
        except OverflowError as error:
            raise LayoutError(
                "a size, offset or stride that does not fit into 64 bits", found=error
            ) from error

    @classmethod
    def from_columns(
        cls,
        names: Sequence[str],
        global_shape: Sequence[Sequence[int]] | ArrayLike,
        *,
        tensor: ArrayLike,
        dtype: ArrayLike,
        box_offset: ArrayLike,
        box_size: ArrayLike,
        storage: ArrayLike,
        storage_nbytes: ArrayLike,
        view_offset: ArrayLike | None = None,
        stride: ArrayLike | None = None,
        ndim: ArrayLike | None = None,
        axes: tuple[ArrayLike, ArrayLike, ArrayLike, ArrayLike] | None = None,
        transforms: ArrayLike | None = None,
        transform_names: Sequence[tuple[str, ...]] = ((),),
    ) -> Manifest:
        """Build a manifest from columns, in any row order; the way for layouts of millions of rows.

        Args:
            names: T distinct names in any order.
            global_shape: i64[T, D], padded with 1.
            tensor: i32[N], index into ``names``.
            dtype: u8[N] codes, or one code for all.
            box_offset: i64[N, D], padded with 0.
            box_size: i64[N, D], padded with 1.
            storage: i32[N].
            storage_nbytes: i64[S].
            view_offset: i64[N], 0 if left out.
            stride: i64[N, D] in elements, one a dimension; row-major over the box if left out.
            ndim: u8[T], D for every tensor if left out.
            axes: (axis_ptr, axis_dim, axis_extent, axis_stride) of nested views, instead of ``stride``.
            transforms: i32[N], index into ``transform_names``.
            transform_names: distinct transform chains.

        Raises:
            LayoutError: as `from_shards`, or columns that do not fit together.
        """
        shape = np.asarray(global_shape, np.int64)
        shape = shape.reshape(len(names), -1) if len(names) else np.ones((0, 1), np.int64)
        rows, depth = np.size(tensor), shape.shape[1]
        ndims = np.full(len(names), depth, np.uint8) if ndim is None else np.asarray(ndim, np.uint8)
        offset = np.asarray(box_offset, np.int64).reshape(rows, depth)
        size = np.asarray(box_size, np.int64).reshape(rows, depth)
        number = np.asarray(tensor, np.int32)
        check.index("tensor", number, len(names))
        nests = axes or _simple_axes(ndims[number], size, stride)
        built = cls(
            names=tuple(names),
            ndim=ndims,
            global_shape=shape,
            tensor=number,
            dtype=np.broadcast_to(np.asarray(dtype, np.uint8), rows),
            box_offset=offset,
            box_size=size,
            storage=np.asarray(storage, np.int32),
            view_offset=np.zeros(rows, np.int64)
            if view_offset is None
            else np.asarray(view_offset, np.int64),
            axis_ptr=np.asarray(nests[0], np.int64),
            axis_dim=np.asarray(nests[1], np.uint8),
            axis_extent=np.asarray(nests[2], np.int64),
            axis_stride=np.asarray(nests[3], np.int64),
            storage_nbytes=np.asarray(storage_nbytes, np.int64),
            transforms=np.zeros(rows, np.int32) if transforms is None else np.asarray(transforms, np.int32),
            transform_names=tuple(transform_names),
        )
        return built._checked()

    @classmethod
    def decode(cls, data: bytes | bytearray | memoryview, max_bytes: int = codec.MAX_BYTES) -> Manifest:
        """Return the manifest that `encode` wrote.

        Args:
            data: one frame, from anybody.
            max_bytes: most that is decoded: of the decompressed payload, and of the columns in memory.

        Raises:
            WireVersionError: a frame of another wire version.
            ManifestError: anything else that is not a whole, canonical, consistent manifest.
        """
        try:
            columns = codec.decode_columns(data, max_bytes)
            table: NameTable = columns.pop("names")
            manifest = cls(names=table.names, **columns)
            object.__setattr__(manifest, "_table", table)
            check.structure(manifest)
            check.order(manifest)
            check.contents(manifest)
            manifest._prepare()
        except ManifestError:
            raise
        except LayoutError as error:
            raise ManifestError(
                f"the bytes hold an impossible manifest: {error.what}",
                tensor=error.tensor,
                expected=error.expected,
                found=error.found,
            ) from error
        return manifest

    def _prepare(self) -> None:
        """Compute, while it is decoded, what every plan asks of this manifest alone."""
        self._table.numbers(current())
        _ = (self.fingerprint, self.shapes_key, self.plain, self.tangled, self.box_hashes)

    def encode(self) -> bytes:
        """Return the manifest as one self-describing, compressed frame for `decode`."""
        return codec.frame(codec.encode_columns(self, self._table))

    @cached_property
    def fingerprint(self) -> bytes:
        """16 bytes: BLAKE2b of the canonical encoding, before compression."""
        return hashlib.blake2b(
            codec.encode_columns(self, self._table), digest_size=FINGERPRINT_BYTES
        ).digest()

    def name_numbers(self, pool: NamePool) -> I32:
        """Return i32[T]: the number of each name in a pool, computed once."""
        return self._table.numbers(pool)

    @cached_property
    def _table(self) -> NameTable:
        return NameTable(self.names)

    @cached_property
    def shapes_key(self) -> bytes:
        """16 bytes over the global shapes, in the order of the names."""
        state = hashlib.blake2b(self.ndim.tobytes(), digest_size=FINGERPRINT_BYTES)
        state.update(self.global_shape.tobytes())
        return state.digest()

    @cached_property
    def plain(self) -> bool:
        """Whether every row is one segment: no row is empty, and no nest has more than one stride."""
        return segments.plain(self)

    @cached_property
    def box_hashes(self) -> U64:
        """u64: a hash of each segment's box, dtype and transform, by which planners find equal ones."""
        return hashing.box_hashes(self)

    @cached_property
    def tangled(self) -> I64:
        """i64: the segments that may share bytes, with others or within themselves; no others do."""
        return overlap.tangled(self)

    def segments(self) -> Segments:
        """Return the shards with every nest expanded to one stride a dimension (computed once)."""
        return self._segments

    @cached_property
    def _segments(self) -> Segments:
        return expand(self)

    def shards(self) -> Iterator[Shard]:
        """Yield the rows as objects, in row order."""
        ptr, ndims = self.axis_ptr.tolist(), self.ndim.tolist()
        shapes = [tuple(s[:n]) for s, n in zip(self.global_shape.tolist(), ndims, strict=True)]
        columns = (self.tensor, self.dtype, self.box_offset, self.box_size, self.storage, self.view_offset)
        rows = zip(*(column.tolist() for column in columns), self.transforms.tolist(), strict=True)
        for row, (tensor, kind, offset, size, storage, start, chain_number) in enumerate(rows):
            n = ndims[tensor]
            extents, strides = self._nests(ptr[row], ptr[row + 1], n)
            yield Shard(
                self.names[tensor],
                shapes[tensor],
                BY_CODE[kind].name,
                Box(tuple(offset[:n]), tuple(size[:n])),
                View(storage, start, extents, strides),
                self.transform_names[chain_number],
            )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Manifest) and self.fingerprint == other.fingerprint

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __repr__(self) -> str:
        sizes = f"{len(self.names)} tensors, {self.rows} shards, {len(self.storage_nbytes)} storages"
        return f"Manifest({sizes}, {int(self.storage_nbytes.sum())} bytes)"

    def _nests(self, start: int, stop: int, ndim: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
        extents: list[list[int]] = [[] for _ in range(ndim)]
        strides: list[list[int]] = [[] for _ in range(ndim)]
        part = slice(start, stop)
        axes = (
            self.axis_dim[part].tolist(),
            self.axis_extent[part].tolist(),
            self.axis_stride[part].tolist(),
        )
        for dim, extent, stride in zip(*axes, strict=True):
            extents[dim].append(extent)
            strides[dim].append(stride)
        return tuple(map(tuple, extents)), tuple(map(tuple, strides))

    def _checked(self) -> Manifest:
        check.structure(self)
        ordered: Any = self.canonical()
        check.contents(ordered)
        return ordered

    @classmethod
    def _from_list(cls, shards: list[Shard], storage_nbytes: Sequence[int]) -> Manifest:
        names: dict[str, int] = {}
        shapes: list[tuple[int, ...]] = []
        tensor = np.empty(len(shards), np.int32)
        for i, shard in enumerate(shards):
            number = tensor[i] = names.setdefault(shard.name, len(names))
            if number == len(shapes):
                shapes.append(shard.global_shape)
            elif shapes[number] != shard.global_shape:
                raise ShapeMismatchError(
                    "one name, two global shapes",
                    tensor=shard.name,
                    expected=shapes[number],
                    found=shard.global_shape,
                )
            _same_ndim(shard)
        depth = max(1, max(map(len, shapes), default=0))
        chains: dict[tuple[str, ...], int] = {}
        transforms = [chains.setdefault(s.transforms, len(chains)) for s in shards]
        return cls.from_columns(
            list(names),
            _padded(shapes, depth, 1),
            ndim=[len(s) for s in shapes],
            tensor=tensor,
            dtype=[code(s.dtype) for s in shards],
            box_offset=_padded([s.box.offset for s in shards], depth, 0),
            box_size=_padded([s.box.size for s in shards], depth, 1),
            storage=[s.view.storage for s in shards],
            view_offset=[s.view.offset for s in shards],
            axes=_axes_of([s.view for s in shards]),
            storage_nbytes=list(storage_nbytes),
            transforms=transforms,
            transform_names=list(chains),
        )


@dataclass(frozen=True)
class Layout:
    """The manifests of all ranks of one side.

    Attributes:
        manifests: index = rank.
        hosts: name of each rank's host, as the planner compares them; all on one unnamed host if left out.
    """

    manifests: tuple[Manifest, ...]
    hosts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "manifests", tuple(self.manifests))
        object.__setattr__(self, "hosts", tuple(self.hosts) or ("",) * len(self.manifests))
        if len(self.hosts) != len(self.manifests):
            raise LayoutError(
                "a layout needs a host for every rank",
                expected=f"{len(self.manifests)} hosts",
                found=f"{len(self.hosts)}",
            )

    @cached_property
    def fingerprint(self) -> bytes:
        """16 bytes over the manifests in rank order and their hosts."""
        state = hashlib.blake2b(digest_size=FINGERPRINT_BYTES)
        state.update(len(self.manifests).to_bytes(8, "little"))
        for manifest, host in zip(self.manifests, self.hosts, strict=True):
            name = host.encode()
            state.update(manifest.fingerprint + len(name).to_bytes(8, "little") + name)
        return state.digest()


def _same_ndim(shard: Shard) -> None:
    if len(shard.global_shape) != shard.box.ndim:
        raise LayoutError(
            "a box must have the dimensions of its tensor",
            tensor=shard.name,
            expected=f"{len(shard.global_shape)} dimensions, as {shard.global_shape}",
            found=f"{shard.box.ndim}: {shard.box}",
        )


def _padded(rows: Sequence[Sequence[int]], depth: int, fill: int) -> I64:
    counts = np.fromiter(map(len, rows), np.int64, len(rows))
    flat = np.fromiter(chain.from_iterable(rows), np.int64, int(counts.sum()))
    padded = np.full((len(rows), depth), fill, np.int64)
    padded[np.arange(depth) < counts[:, None]] = flat
    return padded


def _axes_of(views: Sequence[View]) -> tuple[I64, U8, I64, I64]:
    nests = np.fromiter((len(n) for v in views for n in v.shape), np.int64)
    per_row = np.fromiter((len(v.shape) for v in views), np.int64, len(views))
    dim = np.arange(len(nests)) - np.repeat(np.cumsum(per_row) - per_row, per_row)
    ends = np.append(0, np.cumsum(nests))
    ptr = np.append(0, ends[np.cumsum(per_row)]) if len(views) else np.zeros(1, np.int64)
    total = int(nests.sum())
    extent = np.fromiter(chain.from_iterable(n for v in views for n in v.shape), np.int64, total)
    stride = np.fromiter(chain.from_iterable(n for v in views for n in v.stride), np.int64, total)
    return ptr, np.repeat(dim, nests).astype(np.uint8), extent, stride


def _simple_axes(ndim: U8, size: I64, stride: ArrayLike | None) -> tuple[I64, U8, I64, I64]:
    """Return the axes of views with one stride a dimension, row-major where no strides are given."""
    rows, depth = size.shape
    used = np.arange(depth) < ndim[:, None]
    if stride is None:
        inner = np.ones_like(size)
        inner[:, :-1] = np.maximum(size[:, :0:-1], 1).cumprod(axis=1)[:, ::-1]
        steps = inner
    else:
        steps = np.asarray(stride, np.int64).reshape(rows, depth)
    ptr = np.append(0, np.cumsum(ndim, dtype=np.int64))
    dims = np.broadcast_to(np.arange(depth, dtype=np.uint8), (rows, depth))
    return ptr, dims[used], size[used], steps[used]
