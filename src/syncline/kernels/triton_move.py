"""The kernel that moves everything: gathers, casts, digests, from a table of runs, in one pass.

Work comes in *tiles* of at most 256 cells (4 KiB of a plain copy), each within one run: a few whole rows,
or a part of one. A warp takes a tile, 8 cells a thread, neighbouring threads on neighbouring cells; a
program takes TILES of them at a time, from any runs, so that it has as many bytes in flight for small
fragments as for a matrix of 2 GiB; programs take turns over the whole table, so that all are busy until the
end.

Tensors have the shape [32, TILES, 8, LANES], so that the compiler lays them out just so: threads along the
first dimension, warps along the second, the rest within a thread; a tile's sum needs no shared memory.

Imported only where Triton is (`syncline.kernels.device` does). Bit for bit what `kernels.reference` says.
"""

# Triton reads this module's functions as source, constants and annotations included; it is optional, and its
# compile-time constants are written in capitals.
# ruff: noqa: N803, N806, PLR0917
# pyright: reportMissingImports=false, reportPossiblyUnboundVariable=false

import triton
import triton.language as tl


@triton.jit
def _single_bits(x: tl.tensor, SRC: tl.constexpr):
    """Return elements (bits of SRC) as bits of float32; NaN as the CPU's conversions leave it."""
    if SRC == "float32":
        out = x
    elif SRC == "bfloat16":
        out = x.to(tl.uint32) << 16
    elif SRC == "float16":
        h = x.to(tl.uint32)
        wide = x.to(tl.float16, bitcast=True).to(tl.float32).to(tl.uint32, bitcast=True)
        nan = ((h & 0x8000) << 16) | 0x7FC00000 | ((h & 0x3FF) << 13)
        out = tl.where((h & 0x7FFF) > 0x7C00, nan, wide)
    else:
        tl.static_assert(SRC == "float64", "no such source dtype")
        single = x.to(tl.float64, bitcast=True).to(tl.float32).to(tl.uint32, bitcast=True)
        nan = ((x >> 32).to(tl.uint32) & 0x80000000) | 0x7FC00000 | ((x >> 29).to(tl.uint32) & 0x3FFFFF)
        out = tl.where((x & 0x7FFFFFFFFFFFFFFF) > 0x7FF0000000000000, nan, single)
    return out


@triton.jit
def _narrow_bits(x: tl.tensor, DST: tl.constexpr):
    """Return float32 bits rounded to DST, to nearest and ties to even, as bits of DST."""
    if DST == "float32":
        out = x
    elif DST == "bfloat16":
        rounded = (x + 0x7FFF + ((x >> 16) & 1)) >> 16
        out = tl.where((x & 0x7FFFFFFF) > 0x7F800000, 0xFFFF, rounded).to(tl.uint16)
    else:
        tl.static_assert(DST == "float16", "no such destination dtype")
        half = x.to(tl.float32, bitcast=True).to(tl.float16).to(tl.uint16, bitcast=True)
        quiet = ((x >> 16) & 0x8000) | 0x7E00 | ((x >> 13) & 0x1FF)
        out = tl.where((x & 0x7FFFFFFF) > 0x7F800000, quiet.to(tl.uint16), half)
    return out


@triton.jit
def _weight(word: tl.tensor, keys: tl.tensor, blocks: tl.tensor, mask: tl.tensor):
    """Return the digest's weight of 32-bit words by their canonical number."""
    key = tl.load(keys + (word & 4095), mask=mask, other=0).to(tl.uint64)
    return tl.load(blocks + (word >> 12), mask=mask, other=0) * key


@triton.jit
def _terms(
    units: tl.tensor,
    place: tl.tensor,
    valid: tl.tensor,
    keys: tl.tensor,
    blocks: tl.tensor,
    BYTES: tl.constexpr,
    LANES: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Return uint64[32, TILES, 8]: what each cell of ``units`` adds to a digest.

    ``place`` [32, TILES, 8] is the canonical byte position of each cell's first unit.
    """
    lane = tl.arange(0, LANES)[None, None, None, :]
    mask = valid[:, :, :, None]
    x = units.to(tl.uint32)
    if ALIGNED:  # a cell lies within one block, and no unit is split between two words
        byte = (place & 16383).to(tl.int32)[:, :, :, None] + lane * BYTES
        where = keys + (byte >> 2)
        if BYTES * LANES == 16:
            where = tl.max_contiguous(tl.multiple_of(where, (1, 1, 1, 16)), (1, 1, 1, LANES))
        key = tl.load(where, mask=mask, other=0)
        if BYTES < 4:
            x = x << ((byte & 3) * 8).to(tl.uint32)
        part = tl.sum(key.to(tl.uint64) * x.to(tl.uint64), axis=3)
        terms = part * tl.load(blocks + (place >> 14), mask=valid, other=0)
    else:
        byte = (place[:, :, :, None] + lane * BYTES).to(tl.uint64)
        wide = x.to(tl.uint64) << ((byte & 3) * 8)
        word = byte >> 2
        low = (wide & 0xFFFFFFFF) * _weight(word, keys, blocks, mask)
        terms = tl.sum(low + (wide >> 32) * _weight(word + 1, keys, blocks, mask), axis=3)
    return terms


@triton.jit
def _cells(tile: tl.tensor, run: tl.tensor, first: tl.tensor, tiles: tl.tensor, TILES: tl.constexpr):
    """Return where the tiles from ``first`` on lie.

    That is: their runs' pointers [TILES], row and column of every cell in its run [32, TILES, 8], and which
    of these cells exist.
    """
    t = first + tl.arange(0, TILES)
    live = t < tiles
    t = tile + t.to(tl.int64) * 3
    this = run + tl.load(t, mask=live, other=0).to(tl.int64) * 8
    row = tl.load(t + 1, mask=live, other=0)
    col = tl.load(t + 2, mask=live, other=0)
    extent, limits = tl.load(this + 4), tl.load(this + 5)
    wide = tl.minimum((limits & 0x7FFFFFFF).to(tl.int32) - col, 256)
    rows = tl.minimum((extent & 0x7FFFFFFF).to(tl.int32) - row, (extent >> 32).to(tl.int32))
    count = tl.where(live, rows * wide, 0)[None, :, None]
    k = tl.arange(0, 32)[:, None, None] + 32 * tl.arange(0, 8)[None, None, :]
    # k // wide without a division a lane; exact, as both are below 2**20
    r = ((k + 0.5) * (1.0 / wide.to(tl.float32))[None, :, None]).to(tl.int32)
    c = k - r * wide[None, :, None] + col[None, :, None]
    return this, (r + row[None, :, None]).to(tl.int64), c.to(tl.int64), k < count


@triton.jit
def _address(
    base: tl.tensor,
    stride: tl.tensor,
    r: tl.tensor,
    c: tl.tensor,
    UNIT: tl.constexpr,
    BYTES: tl.constexpr,
    LANES: tl.constexpr,
):
    """Return pointers [32, TILES, 8, LANES] to the units of cells (r, c)."""
    at = base[None, :, None] + r * stride[None, :, None] + c * (BYTES * LANES)
    out = at.to(tl.pointer_type(UNIT))[:, :, :, None] + tl.arange(0, LANES)[None, None, None, :]
    if LANES > 1:  # what the compiler cannot know of addresses from a table: that a cell is one access
        ALIGN: tl.constexpr = min(BYTES * LANES, 16)
        out = tl.max_contiguous(tl.multiple_of(out, (1, 1, 1, ALIGN)), (1, 1, 1, LANES))
    return out


@triton.jit
def _fetch(
    tile: tl.tensor,
    run: tl.tensor,
    first: tl.tensor,
    tiles: tl.tensor,
    UNIT: tl.constexpr,
    BYTES: tl.constexpr,
    LANES: tl.constexpr,
    TILES: tl.constexpr,
):
    this, r, c, valid = _cells(tile, run, first, tiles, TILES)
    at = _address(tl.load(this), tl.load(this + 1), r, c, UNIT, BYTES, LANES)
    return tl.load(at, mask=valid[:, :, :, None], other=0)


@triton.jit
def _add(terms: tl.tensor, group: tl.tensor, digests: tl.tensor):
    """Add a program's terms to its groups' digests."""
    each = tl.sum(tl.sum(terms, axis=2), axis=0)
    lowest = tl.min(group, axis=0)
    if lowest == tl.max(group, axis=0):  # the rule, in runs of more than a few tiles: one addition, not TILES
        tl.atomic_add(digests + lowest, tl.sum(each, axis=0), mask=lowest >= 0, sem="relaxed")
    else:
        tl.atomic_add(digests + group, each, mask=group >= 0, sem="relaxed")


@triton.jit
def move(
    tile: tl.tensor,  # int32[tiles, 3]: run, first row, first cell of its rows
    run: tl.tensor,  # int64[runs, 8]: see `syncline.kernels.device.RUN`
    digests: tl.tensor,  # uint64[groups]
    keys: tl.tensor,  # uint32[4096], the words' weights within a block
    blocks: tl.tensor,  # uint64[...], the blocks' weights
    tiles: tl.tensor,
    SRC: tl.constexpr,
    DST: tl.constexpr,
    SRC_BYTES: tl.constexpr,
    DST_BYTES: tl.constexpr,
    LANES: tl.constexpr,
    ALIGNED: tl.constexpr,
    TILES: tl.constexpr,
    WRITE: tl.constexpr,
    DIGEST: tl.constexpr,
    AGAIN: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Move all tiles; each program takes every ``programs``-th group of TILES tiles.

    With AHEAD a program's next bytes are on their way while it still works on the last ones: where few
    programs have to keep a link busy.
    """
    SRC_UNIT: tl.constexpr = (
        tl.uint8
        if SRC_BYTES == 1
        else (tl.uint16 if SRC_BYTES == 2 else (tl.uint32 if SRC_BYTES == 4 else tl.uint64))
    )
    DST_UNIT: tl.constexpr = tl.uint8 if DST_BYTES == 1 else (tl.uint16 if DST_BYTES == 2 else tl.uint32)
    step = tl.num_programs(0) * TILES
    begin = tl.program_id(0) * TILES
    if AHEAD:
        after = _fetch(tile, run, begin, tiles, SRC_UNIT, SRC_BYTES, LANES, TILES)
    for first in range(begin, tiles, step):
        if AHEAD:
            x = after
            after = _fetch(tile, run, first + step, tiles, SRC_UNIT, SRC_BYTES, LANES, TILES)
        else:
            x = _fetch(tile, run, first, tiles, SRC_UNIT, SRC_BYTES, LANES, TILES)
        this, r, c, valid = _cells(tile, run, first, tiles, TILES)
        mask = valid[:, :, :, None]
        if SRC != DST:
            x = _narrow_bits(_single_bits(x, SRC), DST)
        if WRITE:
            to = _address(tl.load(this + 2), tl.load(this + 3), r, c, DST_UNIT, DST_BYTES, LANES)
            tl.store(to, x, mask=mask)
            if AGAIN:  # by the thread that wrote it, so in order; from memory, not from a cache of its own
                x = tl.load(to, mask=mask, other=0, cache_modifier=".cv")
        if DIGEST:
            place = tl.load(this + 6)[None, :, None] + r * tl.load(this + 7)[None, :, None]
            place += c * (DST_BYTES * LANES)
            # what is masked was loaded as zeros, but a cast may make something else of them
            terms = _terms(tl.where(mask, x, 0), place, valid, keys, blocks, DST_BYTES, LANES, ALIGNED)
            live = first + tl.arange(0, TILES) < tiles
            _add(terms, tl.where(live, (tl.load(this + 5) >> 32).to(tl.int32), -1), digests)
