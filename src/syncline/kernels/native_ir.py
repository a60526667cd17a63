"""Machine operations that numba does not offer: unaligned access, streaming stores, libc's mem*, casts.

Addresses are uint64. An access through `load_u32` and its siblings is ``base`` plus an element index, both
kept apart until the instruction, so that LLVM sees consecutive accesses and vectorises loops over the
index; every access is declared byte-aligned, because runs begin wherever a shard begins.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

if TYPE_CHECKING:
    from collections.abc import Callable

_BYTE_POINTER = ir.IntType(8).as_pointer()
_WORD = ir.IntType(64)
_LINE = ir.VectorType(_WORD, 8)  # one cache line


def _element_pointer(builder: Any, element: ir.Type, base: Any, index: Any) -> Any:
    pointer = builder.inttoptr(base, element.as_pointer())
    return builder.gep(pointer, [index])


def _loader(bits: int, result: types.Type) -> Callable[..., Any]:
    element = ir.IntType(bits)

    @intrinsic
    def load(typing_context: Any, base: Any, index: Any) -> Any:
        signature = result(types.uint64, types.uint64)

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.load(_element_pointer(builder, element, *args), align=1)

        return signature, generate

    return load


def _storer(bits: int, value_type: types.Type) -> Callable[..., Any]:
    element = ir.IntType(bits)

    @intrinsic
    def store(typing_context: Any, base: Any, index: Any, value: Any) -> Any:
        signature = types.void(types.uint64, types.uint64, value_type)

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            base, index, value = args
            builder.store(value, _element_pointer(builder, element, base, index), align=1)
            return context.get_dummy_value()

        return signature, generate

    return store


load_u8, load_u16 = _loader(8, types.uint8), _loader(16, types.uint16)
load_u32, load_u64 = _loader(32, types.uint32), _loader(64, types.uint64)
store_u8, store_u16 = _storer(8, types.uint8), _storer(16, types.uint16)
store_u32, store_u64 = _storer(32, types.uint32), _storer(64, types.uint64)


@intrinsic
def stream_line(typing_context: Any, dst: Any, src: Any) -> Any:
    """Copy 64 bytes to a 64-byte aligned address past the caches."""
    signature = types.void(types.uint64, types.uint64)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        dst, src = args
        line = builder.load(builder.inttoptr(src, _LINE.as_pointer()), align=1)
        store = builder.store(line, builder.inttoptr(dst, _LINE.as_pointer()), align=64)
        store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def copy_line(typing_context: Any, dst: Any, src: Any) -> Any:
    """Copy 64 bytes through the caches."""
    signature = types.void(types.uint64, types.uint64)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        dst, src = args
        line = builder.load(builder.inttoptr(src, _LINE.as_pointer()), align=1)
        builder.store(line, builder.inttoptr(dst, _LINE.as_pointer()), align=1)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def fence(typing_context: Any) -> Any:
    """Order streaming stores before everything that follows."""
    signature = types.void()

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def memcpy(typing_context: Any, dst: Any, src: Any, nbytes: Any) -> Any:
    """Libc's memcpy."""
    signature = types.void(types.uint64, types.uint64, types.uint64)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(_BYTE_POINTER, [_BYTE_POINTER, _BYTE_POINTER, _WORD])
        function = cgutils.get_or_insert_function(builder.module, kind, "memcpy")
        dst, src, nbytes = args
        builder.call(
            function, [builder.inttoptr(dst, _BYTE_POINTER), builder.inttoptr(src, _BYTE_POINTER), nbytes]
        )
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def memcmp(typing_context: Any, left: Any, right: Any, nbytes: Any) -> Any:
    """Libc's memcmp."""
    signature = types.int32(types.uint64, types.uint64, types.uint64)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(32), [_BYTE_POINTER, _BYTE_POINTER, _WORD])
        function = cgutils.get_or_insert_function(builder.module, kind, "memcmp")
        left, right, nbytes = args
        return builder.call(
            function, [builder.inttoptr(left, _BYTE_POINTER), builder.inttoptr(right, _BYTE_POINTER), nbytes]
        )

    return signature, generate


def _ahead(builder: Any, base: Any, offset: Any, write: int, keep: int = 3) -> None:
    """Ask for a cache line that will be read (0) or written (1) soon; any address is allowed.

    With ``keep`` 3 it is brought into the nearest cache, with 2 into the second one, whose queue is longer.
    """
    i32 = ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [_BYTE_POINTER, i32, i32, i32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    flags = [ir.Constant(i32, v) for v in (write, keep, 1)]  # 1: data
    builder.call(function, [builder.gep(builder.inttoptr(base, _BYTE_POINTER), [offset]), *flags])


@intrinsic
def fetch_line(typing_context: Any, src: Any) -> Any:
    """Ask for a cache line that will be read soon, in the second cache; any address is allowed."""
    signature = types.void(types.uint64)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _ahead(builder, args[0], ir.Constant(_WORD, 0), 0, keep=2)
        return context.get_dummy_value()

    return signature, generate


def _line_at(builder: Any, base: Any, offset: Any) -> Any:
    pointer = builder.gep(builder.inttoptr(base, _BYTE_POINTER), [offset])
    return builder.load(builder.bitcast(pointer, _LINE.as_pointer()), align=1)


@intrinsic
def digest_lines(typing_context: Any, addr: Any, lines: Any, keys: Any, read_ahead: Any) -> Any:
    """Return the sum of key * word over whole cache lines.

    A 64-bit lane holds two words and two keys: its low halves are multiplied in place, its high halves
    after a shift, so nothing is unpacked. While a line is multiplied, the one at ``read_ahead`` is fetched.
    """
    return types.uint64(*[types.uint64] * 4), _digest_lines


@intrinsic
def digest_lines_here(typing_context: Any, addr: Any, lines: Any, keys: Any) -> Any:
    """Return what `digest_lines` does, and fetch nothing."""
    return types.uint64(*[types.uint64] * 3), _digest_lines


def _digest_lines(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    addr, lines, keys, *read_ahead = args
    low, shift = (ir.Constant(_LINE, [v] * 8) for v in (0xFFFFFFFF, 32))
    zero = ir.Constant(_LINE, [0] * 8)
    sums = [cgutils.alloca_once(builder, _LINE) for _ in range(2)]
    for total in sums:
        builder.store(zero, total)
    with cgutils.for_range(builder, lines, intp=_WORD) as loop:
        offset = builder.shl(loop.index, ir.Constant(_WORD, 6))
        words, weights = _line_at(builder, addr, offset), _line_at(builder, keys, offset)
        for base in read_ahead:
            _ahead(builder, base, offset, 0)
        even = builder.mul(builder.and_(words, low), builder.and_(weights, low))
        odd = builder.mul(builder.lshr(words, shift), builder.lshr(weights, shift))
        for total, product in zip(sums, (even, odd), strict=True):
            builder.store(builder.add(builder.load(total), product), total)
    both = builder.add(*(builder.load(total) for total in sums))
    lanes = [builder.extract_element(both, ir.Constant(ir.IntType(32), i)) for i in range(8)]
    return functools.reduce(builder.add, lanes)


def _cast(source: types.Type, result: types.Type, emit: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    @intrinsic
    def cast(typing_context: Any, bits: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return emit(builder, args[0])

        return result(source), generate

    return cast


def _emit_single_to_brain(builder: Any, bits: Any) -> Any:
    i16, i32 = ir.IntType(16), ir.IntType(32)
    upper = builder.lshr(bits, ir.Constant(i32, 16))
    tie = builder.and_(upper, ir.Constant(i32, 1))
    rounded = builder.add(builder.add(bits, ir.Constant(i32, 0x7FFF)), tie)
    result = builder.trunc(builder.lshr(rounded, ir.Constant(i32, 16)), i16)
    magnitude = builder.and_(bits, ir.Constant(i32, 0x7FFFFFFF))
    is_nan = builder.icmp_unsigned(">", magnitude, ir.Constant(i32, 0x7F800000))
    return builder.select(is_nan, ir.Constant(i16, 0xFFFF), result)  # torch's vectorised NaN


def _emit_brain_to_single(builder: Any, bits: Any) -> Any:
    i32 = ir.IntType(32)
    return builder.shl(builder.zext(bits, i32), ir.Constant(i32, 16))


def _emit_single_to_half(builder: Any, bits: Any) -> Any:
    half = builder.fptrunc(builder.bitcast(bits, ir.FloatType()), ir.HalfType())
    return builder.bitcast(half, ir.IntType(16))


def _emit_half_to_single(builder: Any, bits: Any) -> Any:
    single = builder.fpext(builder.bitcast(bits, ir.HalfType()), ir.FloatType())
    return builder.bitcast(single, ir.IntType(32))


single_to_brain = _cast(types.uint32, types.uint16, _emit_single_to_brain)
brain_to_single = _cast(types.uint16, types.uint32, _emit_brain_to_single)
single_to_half = _cast(types.uint32, types.uint16, _emit_single_to_half)
half_to_single = _cast(types.uint16, types.uint32, _emit_half_to_single)
