"""Mappings on huge pages: aligned, whole, and gone when nothing refers to them."""

from __future__ import annotations

import ctypes
import gc
import os
from pathlib import Path

import pytest
import torch

from syncline.memory.arena import Arena
from syncline.memory.pages import HUGE, Mapping, map_shared, unmap


def mapped(address: int) -> bool:
    ranges = (line.split(" ", 1)[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(low, 16) <= address < int(high, 16) for low, high in ranges)


@pytest.mark.parametrize("nbytes", [1, 4096, HUGE - 4096, HUGE, HUGE + 1, 3 * HUGE + 12345])
def test_the_whole_file_is_mapped_from_its_start(nbytes: int) -> None:
    fd = os.memfd_create("pages")
    try:
        os.ftruncate(fd, nbytes)
        os.pwrite(fd, b"a", 0)
        os.pwrite(fd, b"z", nbytes - 1)
        address = map_shared(fd, nbytes, writable=False)
    finally:
        os.close(fd)
    assert nbytes < HUGE or address % HUGE == 0
    assert ctypes.string_at(address + nbytes - 1, 1) == b"z"
    unmap(address, nbytes)
    assert not mapped(address)


def test_nothing_is_left_of_the_room_around_a_mapping() -> None:
    fd = os.memfd_create("pages")
    os.ftruncate(fd, 2 * HUGE)

    def address_space() -> int:
        return int(Path("/proc/self/statm").read_text().split()[0])

    before = address_space()
    addresses = [map_shared(fd, 2 * HUGE, writable=False) for _ in range(8)]
    assert address_space() - before == 8 * 2 * HUGE // 4096
    for address in addresses:
        unmap(address, 2 * HUGE)
    os.close(fd)


def test_a_mapping_lives_as_long_as_a_tensor_of_it() -> None:
    fd = os.memfd_create("pages")
    os.ftruncate(fd, HUGE)
    mapping = Mapping(fd, HUGE)
    os.close(fd)
    address, tensor = (
        mapping.address,
        torch.frombuffer(mapping.buffer, dtype=torch.uint8, count=16, offset=64),
    )
    del mapping
    gc.collect()
    tensor.fill_(7)
    assert mapped(address)
    del tensor
    gc.collect()
    assert not mapped(address)


def test_gathering_pages_changes_neither_contents_nor_places() -> None:
    with Arena(3 * HUGE + 4096) as arena:
        arena.reserve(0, arena.nbytes)
        values = arena.storage(0, arena.nbytes)
        values.copy_(torch.arange(arena.nbytes, dtype=torch.int64).to(torch.uint8))
        address, copy = arena.address, values.clone()
        arena.use_huge_pages()
        assert arena.address == address == values.data_ptr()
        assert torch.equal(values, copy)
        other = map_shared(arena.fd, arena.nbytes, writable=False)
        assert ctypes.string_at(other, arena.nbytes) == copy.numpy().tobytes()
        unmap(other, arena.nbytes)
