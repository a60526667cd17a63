"""Ranks with real bytes, a slow and obvious oracle, and an executor of lowered programs.

The oracle knows nothing of plans: it holds every checkpoint tensor whole, and looks at one element at a time.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from syncline.layout import Box, Layout, Manifest, Rules, Shard, View
from syncline.layout.cast import raw_dtype
from syncline.layout.dtype import itemsize, name_of
from syncline.layout.transform import cast_transform
from syncline.plan import Plan, lower, plan

MASK = (1 << 64) - 1
POISON = 0xEE


@dataclass
class Rank:
    """One process: storages as byte arrays, and shards in them."""

    shards: list[Shard] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    memory: list[np.ndarray] = field(default_factory=list)

    def storage(self, nbytes: int) -> int:
        self.sizes.append(nbytes)
        return len(self.sizes) - 1

    def hold(self, name: str, shape: tuple[int, ...], box: Box | None = None, dtype: str = "float32") -> Rank:
        """Hold a box (the whole tensor by default), contiguous, in a storage of its own."""
        whole = Box.whole(shape) if box is None else box
        number = self.storage(whole.numel * itemsize(dtype))
        self.shards.append(Shard(name, shape, dtype, whole, View.contiguous(number, 0, whole.size)))
        return self

    def manifest(self) -> Manifest:
        return Manifest.from_shards(self.shards, self.sizes)

    def poison(self) -> None:
        self.memory = [np.full(n, POISON, np.uint8) for n in self.sizes]


def layout(ranks: list[Rank], hosts: tuple[str, ...] = ()) -> Layout:
    return Layout(tuple(rank.manifest() for rank in ranks), hosts)


def tp(shape: tuple[int, ...], dim: int, parts: int, part: int) -> Box:
    """The box of one of ``parts`` nearly equal cuts along ``dim``, as `torch.chunk` cuts."""
    step = -(-shape[dim] // parts)
    low, high = min(part * step, shape[dim]), min((part + 1) * step, shape[dim])
    offset, size = [0] * len(shape), list(shape)
    offset[dim], size[dim] = low, high - low
    return Box(tuple(offset), tuple(size))


def indices(size: tuple[int, ...]):
    return itertools.product(*(range(n) for n in size))


def element_bytes(shard: Shard, index: tuple[int, ...]) -> slice:
    start = shard.view.element(index) * itemsize(shard.dtype)
    return slice(start, start + itemsize(shard.dtype))


def canonical_state(ranks: list[Rank], rules: Rules, seed: int = 0) -> dict[str, np.ndarray]:
    """Random raw elements, u8[numel, itemsize], for every checkpoint tensor that a writer names."""
    rng = np.random.default_rng(seed)
    state: dict[str, np.ndarray] = {}
    for name, shape, dtype in sorted({(s.name, s.global_shape, s.dtype) for r in ranks for s in r.shards}):
        values = rng.integers(0, 256, (math.prod(shape), itemsize(dtype)), dtype=np.uint8)
        state.setdefault(rules.canonical(name), values)
    return state


def flat_index(shape: tuple[int, ...], place: tuple[int, ...]) -> int:
    number = 0
    for extent, i in zip(shape, place, strict=True):
        number = number * extent + i
    return number


def fill(ranks: list[Rank], state: dict[str, np.ndarray], rules: Rules) -> None:
    """Write every writer's shards, element by element."""
    for rank in ranks:
        rank.poison()
        for s in rank.shards:
            values = state[rules.canonical(s.name)]
            for index in indices(s.box.size):
                place = tuple(o + i for o, i in zip(s.box.offset, index, strict=True))
                rank.memory[s.view.storage][element_bytes(s, index)] = values[
                    flat_index(s.global_shape, place)
                ]


def cast(raw: np.ndarray, src: str, dst: str) -> np.ndarray:
    """Cast raw elements u8[n, itemsize]."""
    if src == dst:
        return raw
    values = np.ascontiguousarray(raw).view(raw_dtype(src)).ravel()
    out = np.ascontiguousarray(cast_transform(src, dst).reference(values))
    return out.view(np.uint8).reshape(len(raw), itemsize(dst))


def check_reader(rank: Rank, state: dict[str, np.ndarray], dtypes: dict[str, str], rules: Rules) -> None:
    """Compare every element of every synced shard, and see that no other byte was touched."""
    expected = [np.full(n, POISON, np.uint8) for n in rank.sizes]
    for s in rank.shards:
        name = rules.canonical(s.name)
        if name not in state:
            assert rules.is_frozen(s.name), s.name
            continue
        values = cast(state[name], dtypes[name], s.dtype)
        for index in indices(s.box.size):
            place = tuple(o + i for o, i in zip(s.box.offset, index, strict=True))
            expected[s.view.storage][element_bytes(s, index)] = values[flat_index(s.global_shape, place)]
    for number, (want, have) in enumerate(zip(expected, rank.memory, strict=True)):
        np.testing.assert_array_equal(have, want, err_msg=f"storage {number}")


def digest(positions: np.ndarray, raw: np.ndarray) -> int:
    """A simple additive digest over (position, bits)."""
    total = 0
    for p, element in zip(positions.tolist(), raw, strict=True):
        bits = int.from_bytes(element.tobytes(), "little")
        total += ((p * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) & MASK | 1) * (bits + 0x1234567)
    return total & MASK


def run_rows(runs):
    """Yield (hop, starts of one row in every stream, elements of the row)."""
    for i in range(len(runs)):
        for row in range(int(runs.rows[i])):
            starts = [int(b[i]) + row * int(s[i]) for b, s in zip(runs.base, runs.stride, strict=True)]
            yield int(runs.hop[i]), starts, int(runs.row_elems[i])


def pull(made: Plan, writers: list[Rank], instance: str, rank: int, reader: Rank) -> dict[int, int]:
    """Execute one reader's program on bytes; return the digest of what each hop installed."""
    hops = made.reader(instance, rank)
    streams = [hops.source_stream(), hops.destination_stream(), made.position_stream(hops)]
    written: dict[int, int] = defaultdict(int)
    for hop, (a, b, p), n in run_rows(lower(hops.size, streams)):
        src, dst = name_of(int(hops.src_dtype[hop])), name_of(int(hops.dst_dtype[hop]))
        source = writers[int(hops.src[hop])].memory[int(hops.src_storage[hop])]
        raw = source[a : a + n * itemsize(src)].reshape(n, itemsize(src))
        raw = cast(raw, src, dst)
        target = reader.memory[int(hops.dst_storage[hop])]
        target[b : b + n * itemsize(dst)] = raw.ravel()
        written[hop] = (written[hop] + digest(np.arange(p, p + n), raw)) & MASK
    return dict(written)


def writer_digests(made: Plan, writers: list[Rank]) -> dict[int, set[int]]:
    """Return, for every piece, the digests that its holders computed."""
    found: dict[int, set[int]] = defaultdict(set)
    for number, writer in enumerate(writers):
        rows = made.digest_rows(number)
        assert (np.diff(rows.piece) >= 0).all()
        sums: dict[int, int] = defaultdict(int)
        runs = lower(rows.size, [rows.source_stream(), made.position_stream(rows)])
        for row, (a, p), n in run_rows(runs):
            src, dst = name_of(int(rows.src_dtype[row])), name_of(int(rows.dtype[row]))
            raw = writer.memory[int(rows.src_storage[row])][a : a + n * itemsize(src)].reshape(
                n, itemsize(src)
            )
            sums[row] = (sums[row] + digest(np.arange(p, p + n), cast(raw, src, dst))) & MASK
        for row, value in sums.items():
            found[int(rows.piece[row])].add(value)
    return found


def check_links(made: Plan) -> None:
    """Both halves of every link list the same boxes, of the same pieces, in the same order."""
    columns = ("tensor", "offset", "size", "src_storage", "src_base", "dst_storage", "dst_base", "nbytes")
    for w in range(made.writers):
        sent = made.writer(w)
        for i, instance in enumerate(made.instances):
            for r in range(made.ranks(instance)):
                mine = made.reader(instance, r)
                mine = mine.take(mine.src == w)
                theirs = sent.take((sent.instance == i) & (sent.dst == r))
                for name in (*columns, "piece", "piece_ptr"):
                    np.testing.assert_array_equal(getattr(mine, name), getattr(theirs, name), err_msg=name)


def sync(
    writers: list[Rank],
    readers: dict[str, list[Rank]],
    rules: Rules | None = None,
    seed: int = 0,
    *,
    made: Plan | None = None,
) -> Plan:
    """Plan, move every byte, compare with the oracle: contents, coverage, digests, both halves of links."""
    rules = Rules() if rules is None else rules
    if made is None:
        made = plan(layout(writers), {name: layout(ranks) for name, ranks in readers.items()}, rules)
    state = canonical_state(writers, rules, seed)
    dtypes = {rules.canonical(s.name): s.dtype for w in writers for s in w.shards}
    fill(writers, state, rules)
    held = writer_digests(made, writers)
    assert set(held) == set(range(made.piece_count))
    assert all(len(values) == 1 for values in held.values()), "replicas digest the same"
    for instance, ranks in readers.items():
        for number, rank in enumerate(ranks):
            rank.poison()
            installed = pull(made, writers, instance, number, rank)
            check_reader(rank, state, dtypes, rules)
            hops = made.reader(instance, number)
            for hop in range(len(hops)):
                parts = hops.piece[hops.piece_ptr[hop] : hops.piece_ptr[hop + 1]]
                assert sum(next(iter(held[p])) for p in parts.tolist()) & MASK == installed[hop]
                assert made.piece_rows(parts).nbytes.sum() == hops.nbytes[hop]
    check_links(made)
    return made
