from __future__ import annotations

import pickle
import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.errors import FencedError, ProtocolError, WireVersionError
from syncline.meta import wire
from syncline.protocol import messages as m
from syncline.protocol.ids import Fence
from tests.meta.jobs import key, writer

FENCE = Fence("job", 1, 2, 3)


def test_requests_and_replies_come_back_equal():
    put = m.Put(FENCE, "t", 4, b"f" * 16, 0, "live", b"binding")
    frame = wire.unpack(wire.pack(wire.Kind.REQUEST, 2**63, 7, put))
    assert (frame.version, frame.kind, frame.request, frame.boot) == (wire.WIRE_VERSION, 3, 2**63, 7)
    assert wire.decode_request(frame.payload) == put
    done = m.PutDone(key(1, 2), "OPEN", ())
    assert wire.decode_reply(wire.unpack(wire.pack(wire.Kind.REPLY, 1, 1, done)).payload) == done


def test_an_error_keeps_its_class_and_parts():
    error = FencedError("superseded", expected=1, found=2, rank="writer 0", tensor="x", hint="go")
    came = wire.decode_error(wire.unpack(wire.pack(wire.Kind.ERROR, 1, 1, error)).payload)
    assert type(came) is FencedError
    assert came.to_wire() == error.to_wire()


def test_another_wire_version_is_named():
    frame = bytearray(wire.pack(wire.Kind.REQUEST, 1, 1, writer()))
    struct.pack_into("<H", frame, 4, wire.WIRE_VERSION + 1)
    with pytest.raises(WireVersionError) as caught:
        wire.check_version(wire.unpack(frame), "a client")
    assert (caught.value.expected, caught.value.found) == ("1", "2")


class Bomb:
    def __reduce__(self):
        return (pytest.fail, ("a pickle was executed",))


@pytest.mark.parametrize(
    "payload",
    [
        pickle.dumps(Bomb()),
        b"",
        b"\xdd\xff\xff\xff\xff",  # an array of 2**32-1 elements that are not there
        b"\xc6\xff\xff\xff\xff",  # 4 GiB of bytes that are not there
        b"\x91" * 100_000,  # nested as deep as it is long
        msgspec.msgpack.encode({"type": "Exec", "code": "1"}),
        msgspec.msgpack.encode({"type": "Heartbeat", "fence": "nobody"}),
        msgspec.msgpack.encode(msgspec.to_builtins(m.Heartbeat(FENCE)) | {"progress": "many"}),
    ],
)
def test_payloads_that_are_no_requests_are_refused(payload):
    with pytest.raises(ProtocolError):
        wire.decode_request(memoryview(payload))


@given(st.binary(max_size=200))
def test_no_bytes_do_anything_but_fail(data):
    with pytest.raises(ProtocolError):
        wire.decode_request(wire.unpack(data).payload)


@given(st.integers(0, 300), st.integers(0, 255))
def test_a_damaged_frame_decodes_or_is_refused(place, value):
    frame = bytearray(wire.pack(wire.Kind.REQUEST, 1, 1, writer(options={"a": "b"})))
    frame[place % len(frame)] = value
    try:
        came = wire.decode_request(wire.unpack(frame).payload)
    except ProtocolError:
        return
    assert isinstance(came, m.Message)


def test_a_frame_beyond_the_limit_is_not_sent():
    with pytest.raises(ProtocolError, match="max_frame"):
        wire.check_size(11, 10, "Put")
