"""The wire form of layouts: a framed, compressed msgpack of packed integer columns; never pickle.

Frame, little-endian::

    magic "SYNL" | u16 wire version | u16 kind | u64 length of what follows | zstd frame with a checksum

The payload of a manifest is a msgpack array of integers and byte strings (`_Payload`). A packed column is one
header byte (coding in the high, log2 of the width in the low four bits) and little-endian signed integers of
the smallest width that fits; tables are stored dimension by dimension. Coding 1 stores differences, modulo
2^64, of neighbouring rows. Sorted names are front-coded: bytes shared with the name before, then the rest.

Whatever a frame declares is compared with the bytes that are there, and with the caller's bound, before
anything of that size is allocated.
"""

from __future__ import annotations

import hashlib
import struct
import weakref
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import zstandard

from syncline.errors import ManifestError, WireVersionError
from syncline.layout.columns import DTYPES
from syncline.layout.names import NameTable

if TYPE_CHECKING:
    from typing import Any

    from numpy.typing import NDArray

    from syncline.layout.columns import I64, Columns

WIRE_VERSION = 1
KIND_MANIFEST = 1
MAX_BYTES = 256 << 20

_MAGIC = b"SYNL"
_HEADER = struct.Struct("<4sHHQ")
_LEVEL = 3
_MAX_WINDOW = 8 << 20
_CHUNK = 1 << 20
_WIDTHS = tuple(np.dtype(t) for t in ("<i1", "<i2", "<i4", "<i8"))
_MAX_NDIM = 64

#: Columns whose rows are close to their neighbours, so that differences are smaller than values.
_DELTA = frozenset({"tensor", "box_offset", "storage", "axis_ptr", "view_offset"})

#: Tables of names that some manifest still uses, by the digest of their bytes.
_tables: weakref.WeakValueDictionary[bytes, NameTable] = weakref.WeakValueDictionary()


class _Payload(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    tensors: int
    depth: int
    rows: int
    axes: int
    storages: int
    name_shared: memoryview
    name_length: memoryview
    names: memoryview
    ndim: memoryview
    global_shape: memoryview
    tensor: memoryview
    dtype: memoryview
    box_offset: memoryview
    box_size: memoryview
    storage: memoryview
    view_offset: memoryview
    axis_ptr: memoryview
    axis_dim: memoryview
    axis_extent: memoryview
    axis_stride: memoryview
    storage_nbytes: memoryview
    transforms: memoryview
    chains: int
    chain_length: memoryview
    chain_part_length: memoryview
    chain_text: memoryview


def frame(payload: bytes, kind: int = KIND_MANIFEST) -> bytes:
    """Return the payload compressed, behind a header that says what it is."""
    packed = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True, write_content_size=True).compress(
        payload
    )
    return _HEADER.pack(_MAGIC, WIRE_VERSION, kind, len(packed)) + packed


def unframe(
    data: bytes | bytearray | memoryview, kind: int = KIND_MANIFEST, max_bytes: int = MAX_BYTES
) -> bytes:
    """Return the payload of one frame.

    Raises:
        WireVersionError: the frame is of another wire version.
        ManifestError: not a frame of that kind, cut off, longer than declared, damaged, or larger than
            ``max_bytes`` when decompressed.
    """
    view = memoryview(data)
    if len(view) < _HEADER.size or bytes(view[:4]) != _MAGIC:
        raise ManifestError("these bytes are not a syncline frame", expected=_MAGIC, found=bytes(view[:8]))
    _, version, found_kind, length = _HEADER.unpack_from(view)
    if version != WIRE_VERSION:
        raise WireVersionError(
            "a frame of another wire version",
            expected=WIRE_VERSION,
            found=version,
            hint="run the same version of syncline on both sides",
        )
    if found_kind != kind:
        raise ManifestError("a frame of another kind", expected=kind, found=found_kind)
    body = view[_HEADER.size :]
    if length != len(body):
        raise ManifestError("the frame's length is not what it declares", expected=length, found=len(body))
    return _decompress(body, max_bytes)


def _decompress(body: memoryview, max_bytes: int) -> bytes:
    try:
        declared = zstandard.frame_content_size(body)
    except zstandard.ZstdError as error:
        raise ManifestError("the frame's body is not zstd data", found=error) from error
    if not 0 <= declared <= max_bytes:
        raise ManifestError(
            "the frame declares a size that is not accepted",
            expected=f"0..{max_bytes} bytes",
            found=declared,
            hint="raise SYNCLINE_MAX_FRAME if the layout really is that large",
        )
    chunks: list[bytes] = []
    size = 0
    try:
        reader = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW).stream_reader(body)
        while size <= declared and (chunk := reader.read(min(_CHUNK, declared + 1 - size))):
            chunks.append(chunk)
            size += len(chunk)
    except zstandard.ZstdError as error:
        raise ManifestError("the frame's body is damaged", found=error) from error
    if size != declared:
        raise ManifestError(
            "the frame's body is cut off", expected=f"{declared} bytes", found=f"{size} bytes"
        )
    return b"".join(chunks)


def encode_columns(c: Columns, names: NameTable | None = None) -> bytes:
    """Return the payload of a manifest: the same bytes for the same columns, on every machine.

    Args:
        c: the columns.
        names: the table of ``c.names``, if there is one; it is coded once for all that share it.
    """
    shared, lengths, text = (names or NameTable(c.names)).coded
    parts = [part.encode() for names in c.transform_names for part in names]
    columns = {name: _pack(getattr(c, name), delta=name in _DELTA) for name in _column_names()}
    payload = _Payload(
        tensors=len(c.names),
        depth=c.global_shape.shape[1],
        rows=c.rows,
        axes=len(c.axis_dim),
        storages=len(c.storage_nbytes),
        name_shared=_pack(shared),
        name_length=_pack(lengths),
        names=memoryview(text),
        chains=len(c.transform_names),
        chain_length=_pack(np.array([len(names) for names in c.transform_names], np.int64)),
        chain_part_length=_pack(np.array([len(part) for part in parts], np.int64)),
        chain_text=memoryview(b"".join(parts)),
        **columns,
    )
    return msgspec.msgpack.encode(payload)


def decode_columns(data: bytes | bytearray | memoryview, max_bytes: int = MAX_BYTES) -> dict[str, Any]:
    """Return the fields of `Columns` from a frame; lengths and encodings are checked, contents are not.

    ``names`` is a `NameTable` instead of a tuple, shared with other manifests that have the same one.

    Raises:
        WireVersionError: as `unframe`.
        ManifestError: as `unframe`, or the payload is not made of whole columns of the declared lengths.
    """
    payload = unframe(data, KIND_MANIFEST, max_bytes)
    try:
        p = msgspec.msgpack.decode(payload, type=_Payload)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ManifestError("the payload is not a manifest", found=error) from error
    _check_counts(p, len(payload), max_bytes)
    shapes = {
        "ndim": (p.tensors,),
        "global_shape": (p.tensors, p.depth),
        "box_offset": (p.rows, p.depth),
        "box_size": (p.rows, p.depth),
        "axis_ptr": (p.rows + 1,),
        "axis_dim": (p.axes,),
        "axis_extent": (p.axes,),
        "axis_stride": (p.axes,),
        "storage_nbytes": (p.storages,),
    }
    columns: dict[str, Any] = {
        name: _unpack(name, getattr(p, name), shapes.get(name, (p.rows,))) for name in _column_names()
    }
    columns["names"] = _names(p, max_bytes)
    columns["transform_names"] = _decode_chains(p)
    return columns


def _column_names() -> tuple[str, ...]:
    return tuple(DTYPES)


def _names(p: _Payload, max_bytes: int) -> NameTable:
    """Return the table of names; the ranks of one instance share one, which is decoded and kept once."""
    state = hashlib.blake2b(digest_size=32)
    for part in (p.name_shared, p.name_length, p.names):
        state.update(len(part).to_bytes(8, "little"))
        state.update(part)
    found = _tables.get(state.digest())
    if found is None:
        shared = _unpack("name_shared", p.name_shared, (p.tensors,))
        lengths = _unpack("name_length", p.name_length, (p.tensors,))
        found = NameTable(_front_decode(shared, lengths, bytes(p.names), max_bytes))
        _tables[state.digest()] = found
    if len(found.names) != p.tensors:
        raise ManifestError("the table of names lies about its length", expected=p.tensors)
    return found


def _pack(column: NDArray[Any], *, delta: bool = False) -> memoryview:
    table = column.astype(np.int64, copy=False)
    if delta and len(table):
        table = np.concatenate([table[:1], np.diff(table, axis=0)])
    low, high = int(table.min(initial=0)), int(table.max(initial=0))
    exponent = next(e for e, t in enumerate(_WIDTHS) if np.iinfo(t).min <= low and high <= np.iinfo(t).max)
    header = bytes([int(delta) << 4 | exponent])
    return memoryview(header + np.ascontiguousarray(table.T, _WIDTHS[exponent]).tobytes())


def _unpack(name: str, packed: memoryview, shape: tuple[int, ...]) -> I64 | NDArray[np.integer]:
    count = int(np.prod(shape, dtype=object))
    header = packed[0] if len(packed) else 0xFF
    delta, exponent = header >> 4, header & 15
    if delta > 1 or exponent >= len(_WIDTHS):
        raise ManifestError(f"column {name} has no known coding", found=header)
    if len(packed) - 1 != count << exponent:
        raise ManifestError(
            f"column {name} has not the length that the manifest declares",
            expected=f"{count << exponent} bytes for shape {shape}",
            found=f"{len(packed) - 1} bytes",
        )
    flat = np.frombuffer(packed, _WIDTHS[exponent], count, 1)
    table = flat.reshape(shape[::-1]).T
    if delta:
        table = np.cumsum(table, axis=0, dtype=np.int64)
    kind = DTYPES.get(name, np.int64)
    limits = np.iinfo(kind)
    if count and (int(table.min()) < limits.min or int(table.max()) > limits.max):
        raise ManifestError(f"column {name} holds a value outside of {np.dtype(kind)}")
    return np.ascontiguousarray(table, kind)


def _check_counts(p: _Payload, nbytes: int, max_bytes: int) -> None:
    counts = {
        "tensors": p.tensors,
        "rows": p.rows,
        "axes": p.axes,
        "storages": p.storages,
        "chains": p.chains,
    }
    for name, count in counts.items():
        if not 0 <= count <= nbytes:
            raise ManifestError(
                f"the number of {name} cannot be right",
                expected=f"0..{nbytes}, the bytes that are there",
                found=count,
            )
    if not 1 <= p.depth <= _MAX_NDIM:
        raise ManifestError("impossible number of dimensions", expected=f"1..{_MAX_NDIM}", found=p.depth)
    expanded = 8 * (p.rows * (2 * p.depth + 5) + p.tensors * (p.depth + 3) + 3 * p.axes + p.storages)
    if expanded > max_bytes:
        raise ManifestError(
            "the manifest's columns would take more memory than accepted",
            expected=f"at most {max_bytes} bytes",
            found=expanded,
            hint="raise SYNCLINE_MAX_FRAME if the layout really is that large",
        )


def _front_decode(
    shared: NDArray[Any], lengths: NDArray[Any], text: bytes, max_bytes: int
) -> tuple[str, ...]:
    sound = not len(lengths) or (int(shared.min()) >= 0 and int(lengths.min()) >= 0)
    sound = sound and int(shared.max(initial=0)) <= max_bytes and int(lengths.max(initial=0)) <= len(text)
    if not sound or int(lengths.sum()) != len(text) or int((shared + lengths).sum()) > max_bytes:
        raise ManifestError("the table of names lies about its lengths", expected=f"{len(text)} bytes")
    names: list[str] = []
    before, at = b"", 0
    try:
        for same, length in zip(shared.tolist(), lengths.tolist(), strict=True):
            if same > len(before):
                raise ManifestError("a name shares more with the one before than there is", found=same)
            before = before[:same] + text[at : at + length]
            at += length
            names.append(before.decode())
    except UnicodeDecodeError as error:
        raise ManifestError("a name that is not UTF-8", found=error) from error
    return tuple(names)


def _decode_chains(p: _Payload) -> tuple[tuple[str, ...], ...]:
    counts = _unpack("chain_length", p.chain_length, (p.chains,))
    if len(counts) and (int(counts.min()) < 0 or int(counts.max()) > len(p.chain_part_length)):
        raise ManifestError("the table of transforms lies about its lengths")
    lengths = _unpack("chain_part_length", p.chain_part_length, (int(counts.sum()),))
    text = bytes(p.chain_text)
    sound = not len(lengths) or (int(lengths.min()) >= 0 and int(lengths.max()) <= len(text))
    if not sound or int(lengths.sum()) != len(text):
        raise ManifestError("the table of transforms lies about its lengths")
    ends = np.cumsum(lengths, dtype=np.int64)
    try:
        parts = [text[e - n : e].decode() for e, n in zip(ends.tolist(), lengths.tolist(), strict=True)]
    except UnicodeDecodeError as error:
        raise ManifestError("a transform's name that is not UTF-8", found=error) from error
    stops = np.cumsum(counts, dtype=np.int64)
    return tuple(tuple(parts[s - n : s]) for s, n in zip(stops.tolist(), counts.tolist(), strict=True))
