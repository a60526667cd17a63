"""Entry points: listed without an import, imported once, and a broken one named."""

from __future__ import annotations

import logging
import subprocess
import sys
from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING

import pytest

from syncline import extensions
from syncline.errors import LayoutError, SynclineError
from syncline.layout.transform import transform
from syncline.transport import registry

if TYPE_CHECKING:
    from pathlib import Path


def test_listing_imports_nothing(site: Path) -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(site)!r});"
        "from syncline import extensions as e;"
        "print(e.installed.names(e.ADAPTERS)); assert 'toy_engine' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "['broken', 'toy']"


def test_an_adapter_is_imported_once(site: Path) -> None:
    assert extensions.adapter("toy").__name__ == "ToyAdapter"
    assert extensions.adapter("toy") is extensions.adapter("toy")


def test_a_broken_one_is_named_and_hinders_no_other(site: Path) -> None:
    with pytest.raises(SynclineError, match=r"'broken' of the group syncline.adapters") as caught:
        extensions.adapter("broken")
    assert "toy-engine" in str(caught.value.expected)
    assert extensions.adapter("toy")


def test_one_that_nobody_offers(site: Path) -> None:
    with pytest.raises(SynclineError, match="no plug-in 'nobody'") as caught:
        extensions.adapter("nobody")
    assert "toy" in str(caught.value.expected)
    with pytest.raises(SynclineError, match="no such group"):
        extensions.installed.names("syncline.engines")


def test_transforms_come_when_one_is_missing_and_only_once(
    site: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert transform("toy:flip").src == "float32"
    assert "'broken'" in caplog.text
    assert transform("toy:flip") is transform("toy:flip")
    with pytest.raises(LayoutError, match="unknown transform") as caught:
        transform("toy:flop")
    assert "broken plug-ins: broken" in str(caught.value.hint)
    assert sys.modules["toy_engine.transforms"].calls == ["offered"]


def test_transports(site: Path) -> None:
    assert "toy-shm" in registry.names()
    assert registry.factory("toy-shm") is registry.factory("shm")


def test_two_packages_of_one_name(monkeypatch: pytest.MonkeyPatch) -> None:
    offers = [EntryPoint("x", f"{home}:thing", extensions.ADAPTERS) for home in ("a", "b", "b")]
    monkeypatch.setattr(extensions, "entry_points", lambda group: offers)
    with pytest.raises(SynclineError, match="two packages offer the plug-in 'x'") as caught:
        extensions.Extensions().load(extensions.ADAPTERS, "x")
    assert str(caught.value.found).count("b:thing") == 1


def test_a_plug_in_may_ask_for_its_own_group(monkeypatch: pytest.MonkeyPatch) -> None:
    offer = EntryPoint("x", "math:pi", extensions.TRANSFORMS)
    monkeypatch.setattr(extensions, "entry_points", lambda group: [offer])
    made, seen = extensions.Extensions(), []

    def take(thing: object) -> None:
        seen.append(thing)
        made.once(extensions.TRANSFORMS, take)

    made.once(extensions.TRANSFORMS, take)
    made.once(extensions.TRANSFORMS, take)
    assert len(seen) == 1
