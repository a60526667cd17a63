"""A side whose ranks are a device mesh: one manifest and a rule instead of a manifest a rank.

FSDP2 cuts every parameter over all ranks. Written out, hundreds of ranks with tens of thousands of parameters
are tens of millions of rows; as a mesh and a placement a parameter they are as many rows as parameters. What
one rank holds is computed when it is asked for.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from syncline.errors import LayoutError, ManifestError
from syncline.layout import codec
from syncline.layout.dtype import ITEMSIZE
from syncline.layout.manifest import FINGERPRINT_BYTES, Layout, Manifest
from syncline.layout.segments import strides

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from syncline.layout.columns import I64

    I8 = NDArray[np.int8]

KIND_MESH = 2

#: Most ranks of a mesh from a frame.
MAX_RANKS = 1 << 20


class _Payload(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    whole: bytes
    mesh: list[int]
    cut: bytes
    hosts: list[str]


@dataclass(frozen=True, eq=False)
class MeshLayout:
    """The manifests of all ranks of one side, by a rule.

    Ranks are numbered row-major over the mesh. Each mesh dimension either leaves a tensor whole or takes a
    chunk of one of its dimensions, one mesh dimension after the other, by ``torch.chunk``'s rule: pieces of
    ``ceil(n / parts)``, the last ones shorter or empty. A rank's pieces lie row-major in the storages that
    the whole tensors have in ``whole``, behind each other in the order that they have there.

    Attributes:
        whole: what a mesh of one rank would hold: every tensor whole, once.
        mesh: its shape.
        cut: i8[T, M]: the dimension of each tensor that each mesh dimension cuts, -1 where it replicates.
        hosts: name of each rank's host; all on one unnamed host if left out.

    Raises:
        LayoutError: tensors that are not whole, not row-major, empty, transformed or of two dtypes in one
            storage; columns that do not fit together.
    """

    whole: Manifest
    mesh: tuple[int, ...]
    cut: I8
    hosts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "mesh", tuple(map(int, self.mesh)))
        cut = np.array(self.cut, np.int8)
        cut.setflags(write=False)
        object.__setattr__(self, "cut", cut)
        object.__setattr__(self, "hosts", tuple(self.hosts) or ("",) * self.ranks)
        self._check()

    @classmethod
    def of(
        cls, whole: Manifest, mesh: tuple[int, ...], cut: ArrayLike, hosts: tuple[str, ...] = ()
    ) -> MeshLayout:
        """Build a layout; ``cut`` is [T, M] or, for one mesh dimension, [T]."""
        table = np.asarray(cut, np.int8)
        return cls(whole, mesh, table[:, None] if table.ndim == 1 else table, hosts)

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return math.prod(self.mesh)

    @cached_property
    def fingerprint(self) -> bytes:
        """16 bytes over everything."""
        state = hashlib.blake2b(b"mesh" + self.whole.fingerprint, digest_size=FINGERPRINT_BYTES)
        state.update(msgspec.msgpack.encode([self.mesh, self.cut.tobytes(), self.hosts]))
        return state.digest()

    def boxes(self, ranks: ArrayLike, tensors: ArrayLike | None = None) -> tuple[I64, I64]:
        """Return (offset, size) i64[R, K, D]: what each of R ranks holds of each of K tensors (all T).

        Where a rank holds no element, some size is 0.
        """
        rows = np.arange(self.whole.rows) if tensors is None else np.asarray(tensors, np.int64)
        place = np.stack(np.unravel_index(np.asarray(ranks, np.int64), self.mesh), axis=-1)
        size = np.repeat(self.whole.global_shape[rows][None], len(place), axis=0)
        offset = np.zeros_like(size)
        for axis, parts in enumerate(self.mesh):
            at = np.nonzero(self.cut[rows, axis] >= 0)[0]
            dim = self.cut[rows[at], axis].astype(np.int64)
            length = size[:, at, dim]
            step = -(-length // parts)
            low = np.minimum(step * place[:, axis, None], length)
            offset[:, at, dim] += low
            size[:, at, dim] = np.minimum(step, length - low)
        return offset, size

    @cached_property
    def alone(self) -> bool:
        """Whether every tensor has a storage of its own, so that every piece begins at element 0."""
        return len(self.whole.storage_nbytes) == self.whole.rows

    def starts(self, rank: int) -> I64:
        """Return i64[T]: the element of its storage at which a rank's piece of each tensor begins."""
        if self.alone:
            return np.zeros(self.whole.rows, np.int64)
        count = self.boxes([rank])[1][0].prod(axis=1)
        order = np.lexsort((self.whole.view_offset, self.whole.storage))
        ends, storage = np.cumsum(count[order]), self.whole.storage[order]
        first = np.searchsorted(storage, storage)
        start = np.empty_like(count)
        start[order] = ends - count[order] - (ends - count[order])[first]
        return start

    def manifest(self, rank: int) -> Manifest:
        """Return what one rank holds, written out; a tensor of which it holds nothing has an empty row."""
        w = self.whole
        (offset,), (size,) = self.boxes([rank])
        empty = (size == 0).any(axis=1)
        nbytes = size.prod(axis=1) * ITEMSIZE[w.dtype]
        totals = np.bincount(w.storage, weights=nbytes, minlength=len(w.storage_nbytes)).astype(np.int64)
        inside = np.arange(size.shape[1]) < w.ndim[:, None]
        offset[empty] = 0
        size = np.where(empty[:, None] & inside, 0, size)
        return Manifest.from_columns(
            w.names,
            w.global_shape,
            ndim=w.ndim,
            tensor=w.tensor,
            dtype=w.dtype,
            box_offset=offset,
            box_size=size,
            storage=w.storage,
            view_offset=np.where(empty, 0, self.starts(rank)),
            storage_nbytes=totals,
        )

    def written_out(self) -> Layout:
        """Return the manifests of all ranks: as many rows as tensors, a rank."""
        return Layout(tuple(map(self.manifest, range(self.ranks))), self.hosts)

    def encode(self) -> bytes:
        """Return the layout as one frame for `decode`."""
        payload = _Payload(self.whole.encode(), list(self.mesh), self.cut.tobytes(), list(self.hosts))
        return codec.frame(msgspec.msgpack.encode(payload), KIND_MESH)

    @classmethod
    def decode(cls, data: bytes | bytearray | memoryview, max_bytes: int = codec.MAX_BYTES) -> MeshLayout:
        """Return the layout that `encode` wrote.

        Raises:
            WireVersionError: a frame of another wire version.
            ManifestError: anything else that is not a whole, consistent layout.
        """
        try:
            p = msgspec.msgpack.decode(codec.unframe(data, KIND_MESH, max_bytes), type=_Payload)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise ManifestError("the payload is not the layout of a mesh", found=error) from error
        if min(p.mesh, default=1) < 1 or math.prod(p.mesh) > MAX_RANKS or len(p.mesh) > len(p.cut) + 1:
            raise ManifestError("an impossible mesh", expected=f"at most {MAX_RANKS} ranks", found=p.mesh)
        whole = Manifest.decode(p.whole, max_bytes)
        if len(p.cut) != whole.rows * len(p.mesh):
            raise ManifestError("placements do not fit the tensors", expected=whole.rows, found=len(p.cut))
        cut = np.frombuffer(p.cut, np.int8).reshape(whole.rows, len(p.mesh))
        try:
            return cls(whole, tuple(p.mesh), cut, tuple(p.hosts))
        except LayoutError as error:
            raise ManifestError(
                f"the bytes hold an impossible layout: {error.what}",
                tensor=error.tensor,
                expected=error.expected,
                found=error.found,
            ) from error

    def _check(self) -> None:
        w, shape = self.whole, (self.whole.rows, len(self.mesh))
        if min(self.mesh, default=1) < 1 or self.cut.shape != shape or len(self.hosts) != self.ranks:
            raise LayoutError(
                "a mesh, its placements and its hosts do not fit",
                expected=f"placements of shape {shape}, {self.ranks} hosts",
                found=f"{self.cut.shape}, {len(self.hosts)} hosts on a mesh {self.mesh}",
            )
        if w.rows != len(w.names) or not w.plain or w.transform_names not in {(), ((),)}:
            raise LayoutError(
                "a mesh cuts whole tensors",
                expected="every tensor once, with elements, without nests and transforms",
                hint="write such a layout out: a manifest a rank",
            )
        row_major = strides(w) == _row_major(w.box_size)
        bad = (w.box_size != w.global_shape).any(axis=1) | ~row_major.all(axis=1)
        bad |= ((self.cut < -1) | (self.cut >= w.ndim[:, None])).any(axis=1)
        kind = np.zeros(len(w.storage_nbytes), np.uint8)
        kind[w.storage] = w.dtype
        bad |= kind[w.storage] != w.dtype
        if bad.any():
            row = int(np.argmax(bad))
            raise LayoutError(
                "a mesh cannot cut this tensor",
                tensor=w.names[row],
                expected="the whole tensor, row-major, one dtype a storage, cuts along its dimensions",
                found=f"shape {w.global_shape[row].tolist()}, box {w.box_size[row].tolist()}, "
                f"cuts {self.cut[row].tolist()}",
            )


def _row_major(size: I64) -> I64:
    """Return i64[N, D]: row-major strides, 0 where there is one index."""
    step = np.ones_like(size)
    for d in range(size.shape[1] - 2, -1, -1):
        step[:, d] = step[:, d + 1] * size[:, d + 1]
    return step * (size != 1)
