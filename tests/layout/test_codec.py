from __future__ import annotations

import pickle
import struct
import subprocess
import sys
import tracemalloc

import msgspec
import numpy as np
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from syncline.errors import ManifestError, WireVersionError
from syncline.layout import Box, Manifest, Shard, View, codec
from tests.layout.strategies import shard_lists

HEADER = struct.Struct("<4sHHQ")


def sample(tensors: int = 20) -> Manifest:
    shards = [
        Shard(
            f"layers.{i}.w",
            (8, 6),
            "float32",
            Box((4, 0), (4, 6)),
            View(i, 2, ((2, 2), (6,)), ((24, 6), (1,))),
            ("cast:float32->bfloat16",) if i % 3 == 0 else (),
        )
        for i in range(tensors)
    ]
    return Manifest.from_shards(shards, [4 * 40] * tensors)


SAMPLE = sample()
FRAME = SAMPLE.encode()
PAYLOAD = codec.unframe(FRAME)
FIELDS: list[object] = msgspec.msgpack.decode(PAYLOAD)
NAMES = codec._Payload.__struct_fields__


def forged(**changes: object) -> bytes:
    """A well-formed frame of the sample with some fields replaced."""
    fields = dict(zip(NAMES, FIELDS, strict=True)) | changes
    return codec.frame(msgspec.msgpack.encode(list(fields.values())))


@given(shard_lists())
def test_round_trip(case: tuple[list[Shard], list[int]]) -> None:
    manifest = Manifest.from_shards(*case)
    frame = manifest.encode()
    decoded = Manifest.decode(frame)
    assert decoded == manifest
    assert decoded.fingerprint == manifest.fingerprint
    assert decoded.encode() == frame
    assert list(decoded.shards()) == list(manifest.shards())
    assert decoded.storage_nbytes.tolist() == case[1]
    assert Manifest.decode(memoryview(bytearray(frame))) == manifest


def test_forging_without_changes_is_the_sample() -> None:
    assert Manifest.decode(forged()) == SAMPLE


def test_fingerprint_is_of_the_wire_format_and_stays() -> None:
    shard = Shard("w", (2, 3), "bfloat16", Box((1, 0), (1, 3)), View.contiguous(0, 3, (1, 3)))
    assert Manifest.from_shards([shard], [12]).fingerprint.hex() == "34a2498dfef34f160c564b5e503a1e7f"


@given(st.integers(0, len(FRAME) - 1))
def test_cut_off_frames_are_refused(length: int) -> None:
    with pytest.raises(ManifestError):
        Manifest.decode(FRAME[:length])


@given(st.binary(min_size=1, max_size=9))
def test_longer_frames_are_refused(tail: bytes) -> None:
    with pytest.raises(ManifestError):
        Manifest.decode(FRAME + tail)


@settings(max_examples=400)
@given(st.integers(0, len(FRAME) * 8 - 1))
def test_a_flipped_bit_is_refused_or_harmless(bit: int) -> None:
    damaged = bytearray(FRAME)
    damaged[bit // 8] ^= 1 << bit % 8
    try:
        decoded = Manifest.decode(damaged)
    except (ManifestError, WireVersionError):
        return
    assert decoded == SAMPLE


@settings(max_examples=500, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, len(PAYLOAD) - 1), st.integers(0, 255))
def test_damage_behind_a_good_checksum_is_refused_or_another_valid_manifest(at: int, byte: int) -> None:
    """A peer that lies deliberately sends a frame whose checksum is right: what passes must be usable."""
    payload = bytearray(PAYLOAD)
    payload[at] = byte
    try:
        decoded = Manifest.decode(codec.frame(bytes(payload)))
    except ManifestError:
        return
    rebuilt = Manifest.from_shards(decoded.shards(), decoded.storage_nbytes.tolist())
    assert rebuilt == decoded
    assert len(decoded.segments()) >= 0


@given(st.binary(max_size=200))
def test_noise_is_refused(data: bytes) -> None:
    for bad in (data, codec.frame(data)):
        with pytest.raises(ManifestError):
            Manifest.decode(bad)


def test_other_wire_versions_are_named() -> None:
    _, _, kind, length = HEADER.unpack_from(FRAME)
    for version in (0, codec.WIRE_VERSION + 1, 0xFFFF):
        with pytest.raises(WireVersionError) as caught:
            Manifest.decode(HEADER.pack(b"SYNL", version, kind, length) + FRAME[HEADER.size :])
        assert caught.value.found == str(version)
        assert caught.value.expected == str(codec.WIRE_VERSION)
    with pytest.raises(ManifestError, match="another kind"):
        Manifest.decode(HEADER.pack(b"SYNL", codec.WIRE_VERSION, 77, length) + FRAME[HEADER.size :])


class _Bomb:
    def __reduce__(self) -> tuple[object, ...]:
        return (sys.exit, (99,))


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickle_is_refused_and_never_run(protocol: int) -> None:
    """B102: a pickle, bare or dressed as a frame, is bytes like any other."""
    payload = pickle.dumps(_Bomb(), protocol)
    for data in (payload, codec.frame(payload), HEADER.pack(b"SYNL", 1, 1, len(payload)) + payload):
        with pytest.raises(ManifestError):
            Manifest.decode(data)


def column(values: list[int], width: str = "b", coding: int = 0) -> bytes:
    exponent = {"b": 0, "h": 1, "i": 2, "q": 3}[width]
    return bytes([coding << 4 | exponent]) + struct.pack(f"<{len(values)}{width}", *values)


BIG = 2**62
N = len(SAMPLE.names)


@pytest.mark.parametrize(
    "lie",
    [
        {"rows": 10**12},
        {"rows": -1},
        {"rows": N + 1},
        {"tensors": 10**12},
        {"axes": 2**40},
        {"storages": 2**40},
        {"depth": 0},
        {"depth": 10**6},
        {"chains": 10**9},
        {"names": b"x"},
        {"names": b"\xff" * len(FIELDS[NAMES.index("names")])},  # pyright: ignore[reportArgumentType]
        {"name_shared": column([0] + [BIG] * (N - 1), "q")},
        {"name_shared": column([5] + [0] * (N - 1))},
        {"name_length": column([BIG] * N, "q")},
        {"name_length": column([-1] * N)},
        {"tensor": column([0] * N)},
        {"tensor": column([N] * N)},
        {"tensor": column([2**31] * N, "q")},
        {"tensor": column([BIG] * N, "q", coding=1)},
        {"tensor": b""},
        {"tensor": bytes([0x24]) + b"\0" * N},
        {"dtype": column([0] * N)},
        {"dtype": column([99] * N)},
        {"storage": column([-1] * N)},
        {"storage": column([N] * N)},
        {"storage_nbytes": column([-1] * N)},
        {"storage_nbytes": column([8] * N)},
        {"view_offset": column([-1] * N)},
        {"view_offset": column([BIG] * N, "q")},
        {"box_offset": column([1] * N * 2)},
        {"box_offset": column([2**63 - 1] * N * 2, "q")},
        {"box_size": column([2**63 - 1] * N * 2, "q")},
        {"box_size": column([-1] * N * 2)},
        {"global_shape": column([BIG] * N * 2, "q")},
        {"global_shape": column([-4] * N * 2)},
        {"ndim": column([1] * N)},
        {"ndim": column([9] * N)},
        {"axis_ptr": column([0] * (N + 1))},
        {"axis_ptr": column([0, 6, 3] + [3] * (N - 3) + [3 * N])},
        {"axis_dim": column([7] * 3 * N)},
        {"axis_dim": column([1] * 3 * N)},
        {"axis_extent": column([-1] * 3 * N)},
        {"axis_extent": column([2**32, 2**32, 6] * N, "q")},
        # 4 x (2^62 + 1) is 4 modulo 2^64
        {"axis_extent": column([4, BIG + 1, 6] * N, "q"), "axis_stride": column([0, 0, 1] * N)},
        {"axis_stride": column([BIG] * 3 * N, "q")},
        {"axis_stride": column([-(2**63)] * 3 * N, "q")},
        {"transforms": column([9] * N)},
        {"transforms": column([0] * N)},
        {"chain_length": column([0, BIG], "q")},
        {"chain_length": column([1, 0])},
        {"chain_text": b""},
        {"chain_part_length": column([-1])},
    ],
    ids=str,
)
def test_lies_behind_a_good_checksum_are_refused(lie: dict[str, object]) -> None:
    with pytest.raises(ManifestError):
        Manifest.decode(forged(**lie))


def test_wrong_types_and_missing_fields_are_refused() -> None:
    for payload in (FIELDS[:-1], [*FIELDS, 1], {"rows": 3}, [str(f) for f in FIELDS], 7, None):
        with pytest.raises(ManifestError):
            Manifest.decode(codec.frame(msgspec.msgpack.encode(payload)))
    deep = b"\x91" * 200_000 + b"\xc0"
    with pytest.raises(ManifestError):
        Manifest.decode(codec.frame(deep))


def peak_of(data: bytes, max_bytes: int) -> int:
    tracemalloc.start()
    try:
        with pytest.raises(ManifestError):
            Manifest.decode(data, max_bytes=max_bytes)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def huge_zstd_claim() -> bytes:
    """A zstd frame header that claims 2^60 bytes, with a few bytes of body."""
    body = b"\x28\xb5\x2f\xfd" + bytes([0xE0]) + struct.pack("<Q", 2**60) + b"\x01\x00\x00"
    return HEADER.pack(b"SYNL", codec.WIRE_VERSION, codec.KIND_MANIFEST, len(body)) + body


def claim_without_bytes() -> bytes:
    """The declared content size is within the bound, but the bytes are not there."""
    body = b"\x28\xb5\x2f\xfd" + bytes([0xE0]) + struct.pack("<Q", 200 << 20) + b"\x01\x00\x00"
    return HEADER.pack(b"SYNL", codec.WIRE_VERSION, codec.KIND_MANIFEST, len(body)) + body


def lying_array() -> bytes:
    return codec.frame(b"\xdd\xff\xff\xff\xff" + b"\xc0" * 64)


def lying_binary() -> bytes:
    return codec.frame(b"\xdc\x00\x1a" + b"\x01" * 5 + b"\xc6\xff\xff\xff\xff" + b"x" * 64)


def lying_header() -> bytes:
    return HEADER.pack(b"SYNL", codec.WIRE_VERSION, codec.KIND_MANIFEST, 2**63) + FRAME[HEADER.size :]


def shared_prefixes() -> bytes:
    """Names that expand: a long first name, which all others share."""
    n = 1000
    ends = [f"{i:04}".encode() for i in range(n)]
    first = b"a" * 1_000_000
    return forged(
        tensors=n,
        name_shared=column([0] + [len(first)] * (n - 1), "i"),
        name_length=column([len(first)] + [4] * (n - 1), "i"),
        names=first + b"".join(ends[1:]),
        ndim=column([2] * n),
        global_shape=column([8] * n + [6] * n),
    )


@pytest.mark.parametrize(
    "attack",
    [
        huge_zstd_claim,
        claim_without_bytes,
        lying_array,
        lying_binary,
        lying_header,
        shared_prefixes,
    ],
)
def test_no_lie_makes_a_big_allocation(attack: object) -> None:
    data: bytes = attack()  # pyright: ignore[reportCallIssue]
    assert peak_of(data, codec.MAX_BYTES) < 16 << 20


def test_a_window_of_128_mib_is_refused_before_it_is_allocated() -> None:
    """A well-formed frame of 2 MiB of zeros (larger than one read) that asks for such a window."""
    blocks = 16
    head = b"\x28\xb5\x2f\xfd" + bytes([0x80, (27 - 10) << 3]) + struct.pack("<I", blocks << 17)
    repeats = [
        ((1 << 17) << 3 | 1 << 1 | (i == blocks - 1)).to_bytes(3, "little") + b"\0" for i in range(blocks)
    ]
    body = head + b"".join(repeats)
    frame = HEADER.pack(b"SYNL", codec.WIRE_VERSION, codec.KIND_MANIFEST, len(body)) + body
    with pytest.raises(ManifestError, match="damaged"):
        Manifest.decode(frame)


def test_a_bomb_stops_at_the_bound() -> None:
    bomb = codec.frame(b"\0" * (64 << 20))
    assert len(bomb) < 1 << 16
    assert peak_of(bomb, 1 << 20) < 4 << 20
    # the same bomb without its content size, so that nothing can be known in advance
    nameless = zstandard.ZstdCompressor(write_content_size=False).compress(b"\0" * (64 << 20))
    frame = HEADER.pack(b"SYNL", codec.WIRE_VERSION, codec.KIND_MANIFEST, len(nameless)) + nameless
    assert peak_of(frame, 1 << 20) < 4 << 20


def test_columns_that_expand_are_bounded_too() -> None:
    manifest = sample(2000)
    with pytest.raises(ManifestError, match="more memory than accepted"):
        Manifest.decode(manifest.encode(), max_bytes=len(codec.unframe(manifest.encode())))
    assert Manifest.decode(manifest.encode(), max_bytes=1 << 20) == manifest


def test_decoding_needs_neither_torch_nor_any_training_library() -> None:
    """B102: a process in which torch and trainers cannot be imported reads a trainer's metadata."""
    program = (
        "import sys\n"
        "class Block:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in {'torch', 'megatron', 'deepspeed', 'transformers'}:\n"
        "            raise ImportError(f'{name} is blocked')\n"
        "sys.meta_path.insert(0, Block())\n"
        "from syncline.layout import Manifest\n"
        "manifest = Manifest.decode(sys.stdin.buffer.read())\n"
        "print(manifest.fingerprint.hex(), len(manifest.segments()))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], input=FRAME, capture_output=True, check=True, timeout=30
    )
    assert done.stdout.decode().split() == [SAMPLE.fingerprint.hex(), str(len(SAMPLE.segments()))]


def test_two_hundred_thousand_entries_round_trip() -> None:
    """B102: metadata of 200,000 entries."""
    names = [f"layers.{i // 1000}.experts.{i % 1000}.w" for i in range(200_000)]
    manifest = Manifest.from_columns(
        names,
        np.tile([64, 32], (len(names), 1)),
        tensor=np.arange(len(names)),
        dtype=3,
        box_offset=np.zeros((len(names), 2), np.int64),
        box_size=np.tile([64, 32], (len(names), 1)),
        storage=np.arange(len(names)),
        storage_nbytes=np.full(len(names), 64 * 32 * 2),
    )
    frame = manifest.encode()
    assert len(frame) < 1 << 20
    decoded = Manifest.decode(frame)
    assert decoded == manifest
    assert decoded.names == tuple(sorted(names))
