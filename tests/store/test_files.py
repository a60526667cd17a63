"""The file tier: whole or absent, and readable by anybody."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file

from syncline import faults
from syncline.errors import LayoutError, MemoryBudgetError
from syncline.faults import InjectedFaultError
from syncline.store.files import INDEX_NAME, TensorEntry, save_checkpoint

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

TENSORS = {
    "a": torch.arange(6.0).reshape(2, 3),
    "b": torch.arange(8, dtype=torch.bfloat16),
    "c": torch.tensor(7, dtype=torch.int64),
}
ENTRIES = [TensorEntry(n, t.numel() * t.element_size()) for n, t in TENSORS.items()]


def fetch(names: Sequence[str]) -> dict[str, torch.Tensor]:
    return {name: TENSORS[name] for name in names}


def load_all(directory: Path) -> dict[str, torch.Tensor]:
    return {k: v for path in sorted(directory.glob("*.safetensors")) for k, v in load_file(path).items()}


def same(directory: Path) -> bool:
    found = load_all(directory)
    return found.keys() == TENSORS.keys() and all(torch.equal(found[k], TENSORS[k]) for k in found)


def test_one_file_needs_no_index(tmp_path: Path) -> None:
    files = save_checkpoint(tmp_path / "v1", ENTRIES, fetch, metadata={"version": "1.1"})
    assert [f.name for f in files] == ["model.safetensors"]
    assert same(tmp_path / "v1")
    assert not (tmp_path / "v1" / INDEX_NAME).exists()


@pytest.mark.parametrize(("limit", "count"), [(1, 3), (24, 2), (40, 2), (48, 1)])
def test_shards_follow_the_limit_and_the_contents_do_not(tmp_path: Path, limit: int, count: int) -> None:
    files = save_checkpoint(tmp_path / "v", ENTRIES, fetch, max_shard_bytes=limit)
    assert len(files) == count
    assert same(tmp_path / "v")
    if count > 1:
        index = json.loads((tmp_path / "v" / INDEX_NAME).read_text())
        assert index["metadata"]["total_size"] == 24 + 16 + 8
        assert set(index["weight_map"]) == set(TENSORS)


def test_side_files_come_along_and_weights_do_not(tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text("{}")
    (base / "model.safetensors").write_text("old weights")
    (base / "model.safetensors.index.json").write_text("old index")
    save_checkpoint(tmp_path / "v", ENTRIES, fetch, base=base)
    assert sorted(p.name for p in (tmp_path / "v").iterdir()) == ["config.json", "model.safetensors"]
    assert same(tmp_path / "v")


@pytest.mark.parametrize("point", ["files.before_shard", "files.before_rename"])
def test_a_failure_midway_leaves_the_old_checkpoint_and_no_litter(tmp_path: Path, point: str) -> None:
    (tmp_path / "v").mkdir()
    (tmp_path / "v" / "marker").write_text("the old one")
    with faults.arm(point, "raise"), pytest.raises(InjectedFaultError):
        save_checkpoint(tmp_path / "v", ENTRIES, fetch)
    assert [p.name for p in tmp_path.iterdir()] == ["v"]
    assert (tmp_path / "v" / "marker").read_text() == "the old one"


def test_an_existing_checkpoint_is_replaced_as_a_whole(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "v", ENTRIES, fetch, max_shard_bytes=1)
    save_checkpoint(tmp_path / "v", ENTRIES[:1], fetch)
    assert [p.name for p in (tmp_path / "v").iterdir()] == ["model.safetensors"]
    assert [p.name for p in tmp_path.iterdir()] == ["v"]


def test_bad_input_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(LayoutError):
        save_checkpoint(tmp_path / "v", [], fetch)
    with pytest.raises(LayoutError, match="twice"):
        save_checkpoint(tmp_path / "v", [*ENTRIES, ENTRIES[0]], fetch)
    with pytest.raises(MemoryBudgetError, match="bytes free"):
        save_checkpoint(tmp_path / "v", [TensorEntry("huge", 1 << 60)], fetch)
    assert list(tmp_path.iterdir()) == []
