from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from syncline.errors import ProtocolError
from syncline.protocol import job
from syncline.protocol import messages as m
from syncline.protocol.ids import Fence, VersionKey
from syncline.protocol.job import _FENCED, _FREE
from tests.protocol.driver import Job, Writer


def test_a_newer_epoch_is_newer_whatever_its_number() -> None:
    assert VersionKey(2, 3) > VersionKey(1, 900)
    assert VersionKey(2, 3) < VersionKey(2, 4)
    assert str(VersionKey(2, 3)) == "2.3"


def test_every_request_has_a_handler_and_a_tag_of_its_own() -> None:
    handled = {*_FREE, *_FENCED, m.Watch}
    assert handled == set(m.REQUESTS)
    tags = [kind.__struct_config__.tag for kind in (*m.REQUESTS, *m.REPLIES)]
    assert len(tags) == len(set(tags))


def test_every_deferrable_request_carries_a_deadline() -> None:
    deferrable = {
        m.AwaitMembers,
        m.GetManifest,
        m.GetBinding,
        m.FetchDigests,
        m.CloseWindow,
        m.WaitCommitted,
        m.BeginUpdate,
        m.AwaitServing,
        m.AwaitUpdate,
        m.AwaitBound,
        m.AwaitDirty,
        m.AwaitVerified,
        m.AwaitDecision,
        m.AwaitPulls,
        m.Failed,  # from a controller that waits for its ranks' word
        m.Watch,
    }
    assert {one for one in m.REQUESTS if "deadline" in one.__struct_fields__} == deferrable


def test_messages_are_immutable_and_survive_the_wire() -> None:
    fence = Fence("job", 1, 2, 3).at(4)
    request = m.Commit(fence, "weights", "a", VersionKey(1, 2), VersionKey(2, 0), 4)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=m.Request) == request
    with pytest.raises(AttributeError):
        request.attempt = 5  # pyright: ignore[reportAttributeAccessIssue]


def test_a_malformed_message_does_not_decode() -> None:
    bad = msgspec.msgpack.encode({"type": "Commit", "fence": 3})
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(bad, type=m.Request)


@pytest.mark.parametrize("deadline", [-1.0, float("nan"), float("inf"), 1e9])
def test_unusable_deadlines_are_refused(deadline: float) -> None:
    driver = Job()
    writer = Writer(driver, 0, 1, "w")
    with pytest.raises(ProtocolError, match="deadline"):
        driver.send(m.AwaitMembers(writer.fence, "weights", deadline))


def test_what_is_not_a_request_is_refused() -> None:
    driver = Job()
    with pytest.raises(ProtocolError, match="not a request"):
        driver.state.handle(m.Done(), 100.0)  # pyright: ignore[reportArgumentType]


def test_the_protocol_needs_no_torch_and_no_sockets() -> None:
    """Imported without the package around it, whose own face may need torch."""
    code = (
        "import sys, types; package = types.ModuleType('syncline'); package.__path__ = [sys.argv[1]]; "
        "sys.modules['syncline'] = package; import syncline.protocol.job; "
        "print(*{'torch', 'numpy', 'zmq', 'socket', 'multiprocessing'} & set(sys.modules))"
    )
    where = str(Path(job.__file__).parent.parent)
    found = subprocess.run([sys.executable, "-c", code, where], capture_output=True, text=True, check=True)
    assert found.stdout.split() == []
