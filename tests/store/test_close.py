"""How a writer leaves when the others are gone."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from syncline.errors import DeadlineError
from syncline.meta import MetaServer
from syncline.options import Options
from syncline.store.writer import WeightWriter
from tests.store.pair import OPTIONS, Trainer, module, stamped

if TYPE_CHECKING:
    from tests.store.pair import Job


def test_a_writer_whose_server_is_gone_leaves_after_a_lease(job: Job) -> None:
    options = Options(**{**OPTIONS, "update_timeout": 60.0, "lease": 1.0})
    server = MetaServer(job.name, options=options).start()
    try:
        writer = WeightWriter(
            Trainer(module({"w": stamped(4, 4)})), job=job.name, options=options, serve=False
        )
        writer.publish(1).wait()
    finally:
        server.stop()
    began = time.monotonic()
    with pytest.raises(DeadlineError, match="MetaServer"):
        writer.close()
    assert time.monotonic() - began < options.update_timeout / 2  # a deadline, not a speed
    assert not list(writer.member.directory.path.rglob("*.shm"))


def test_a_writer_without_an_open_window_needs_no_server_to_leave(job: Job) -> None:
    options = Options(**{**OPTIONS, "update_timeout": 60.0, "lease": 1.0})
    server = MetaServer(job.name, options=options).start()
    try:
        writer = WeightWriter(
            Trainer(module({"w": stamped(4, 4)})), job=job.name, options=options, serve=False
        )
        writer.publish(1).wait()
        writer.close_window()
    finally:
        server.stop()
    writer.close()
