from __future__ import annotations

import pickle
import socket
import struct
import time

import pytest
import zmq

from syncline.errors import (
    AuthError,
    DeadlineError,
    ManifestError,
    ProtocolError,
    SynclineError,
    WireVersionError,
)
from syncline.layout import Manifest
from syncline.meta import MetaClient, wire
from syncline.meta.address import parse
from syncline.meta.keys import JobKeys
from syncline.meta.rundir import JobDir
from syncline.protocol import messages as m
from tests.meta.jobs import FP, QUICK, manifest, writer
from tests.meta.test_wire import Bomb


def raw(endpoint, keys=None, client_keys=None):
    """A DEALER of our own, with or without keys."""
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.linger = 0
    if keys is not None:
        pair = client_keys or keys.client
        dealer.curve_serverkey = keys.server.public
        dealer.curve_publickey, dealer.curve_secretkey = pair.public, pair.secret
    dealer.connect(endpoint)
    return context, dealer


@pytest.fixture
def dealer():
    opened = []

    def make(*args, **kwargs):
        opened.append(raw(*args, **kwargs))
        return opened[-1][1]

    yield make
    for context, one in opened:
        one.close(0)
        context.term()


def refused(server, job, token):
    began = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SYNCLINE_META_ENDPOINT", server.endpoint)
        patch.setenv("SYNCLINE_JOB_TOKEN", token)
        with MetaClient(job, QUICK) as stranger, pytest.raises(AuthError) as caught:
            stranger.request(m.StatusQuery(), 10)
    assert time.monotonic() - began < 1.5
    assert server.endpoint in str(caught.value)


def test_another_token_is_refused(serve):
    refused(serve(), "job", "another token, long enough")


def test_the_token_of_the_job_does_not_open_another_job(serve):
    refused(serve(), "other", JobDir.open("job").token().decode())


def test_a_right_server_key_with_a_wrong_client_key_is_refused(serve, dealer):
    server = serve()
    keys = JobKeys.derive(JobDir.open("job").token(), "job")
    wrong = JobKeys.derive(b"another token, long enough", "job").client
    one = dealer(server.endpoint, keys, wrong)
    one.send(wire.pack(wire.Kind.HELLO, 1, 0, wire.Hello("job", "p", "1")))
    assert one.poll(700) == 0
    assert server.rejected == 1


def test_no_token_at_all_is_said_at_once(serve, monkeypatch):
    monkeypatch.setenv("SYNCLINE_META_ENDPOINT", serve().endpoint)
    monkeypatch.setenv("SYNCLINE_RUN_DIR", "/nonexistent")
    with MetaClient("job", QUICK) as stranger, pytest.raises(AuthError, match="no job key"):
        stranger.request(m.StatusQuery())


def test_environment_alone_is_enough(serve, monkeypatch):
    server, token = serve(), JobDir.open("job").token().decode()
    monkeypatch.setenv("SYNCLINE_META_ENDPOINT", server.endpoint)
    monkeypatch.setenv("SYNCLINE_JOB_TOKEN", token)
    monkeypatch.setenv("SYNCLINE_RUN_DIR", "/nonexistent")
    with MetaClient("job", QUICK) as elsewhere:
        elsewhere.connect()
        assert elsewhere.boot == 1


def test_a_plain_socket_gets_nothing(serve, dealer):
    one = dealer(serve().endpoint)
    one.send(wire.pack(wire.Kind.HELLO, 1, 0, wire.Hello("job", "p", "1")))
    assert one.poll(300) == 0


def test_bytes_on_the_port_disturb_nobody(serve, client):
    server, member = serve(), client()
    fence = member.register(writer()).fence
    for garbage in (pickle.dumps(Bomb()), b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 100_000, b""):
        with socket.create_connection(parse(server.endpoint)) as raw_socket:
            raw_socket.sendall(garbage)
            member.request(m.Heartbeat(fence), 2)
    with socket.create_connection(parse(server.endpoint)):  # says nothing, and stays
        member.request(m.Heartbeat(fence), 2)


def test_garbage_from_a_member_is_refused_and_disturbs_nobody(serve, client, dealer):
    server, member = serve(), client()
    fence = member.register(writer()).fence
    one = dealer(server.endpoint, JobKeys.derive(JobDir.open("job").token(), "job"))
    good = wire.pack(wire.Kind.REQUEST, 9, server.boot, m.StatusQuery())
    for garbage in (pickle.dumps(Bomb()), b"", good[:10], good[:24] + pickle.dumps(Bomb())):
        one.send(garbage)
    one.send_multipart([b"a", b"b", good])
    assert one.poll(2000)
    answer = wire.unpack(one.recv())
    assert (answer.kind, answer.request) == (wire.Kind.ERROR, 9)
    assert isinstance(wire.decode_error(answer.payload), ProtocolError)
    member.request(m.Heartbeat(fence), 2)
    assert server.rejected == 5


def test_a_request_meant_for_the_server_before_is_left_unanswered(serve, dealer):
    server = serve()
    one = dealer(server.endpoint, JobKeys.derive(JobDir.open("job").token(), "job"))
    for number, boot in ((1, server.boot - 1), (2, server.boot)):
        one.send(wire.pack(wire.Kind.REQUEST, number, boot, m.StatusQuery()))
    assert one.poll(2000)
    answer = wire.unpack(one.recv())
    assert (answer.kind, answer.request, answer.boot) == (wire.Kind.REPLY, 2, server.boot)
    assert one.poll(50) == 0


def test_a_frame_beyond_the_limit_costs_its_sender_the_connection(serve, client, dealer):
    server, member = serve(), client()
    fence = member.register(writer()).fence
    one = dealer(server.endpoint, JobKeys.derive(JobDir.open("job").token(), "job"))
    one.send(b"x" * (QUICK.max_frame + 1))
    one.send(wire.pack(wire.Kind.REQUEST, 1, server.boot, m.StatusQuery()))
    member.request(m.Heartbeat(fence), 2)
    with pytest.raises(ProtocolError, match="max_frame"):
        member.request(m.PutManifest(fence, FP, b"x" * QUICK.max_frame))


def test_an_older_client_is_told_the_versions(serve, monkeypatch):
    serve()
    with MetaClient("job", QUICK) as old:
        with monkeypatch.context() as patch:
            honest = wire.pack

            def dated(kind, request, boot, payload):
                frame = bytearray(honest(kind, request, boot, payload))
                if kind is wire.Kind.HELLO:
                    struct.pack_into("<H", frame, 4, 0)
                return bytes(frame)

            patch.setattr(wire, "pack", dated)
            with pytest.raises(WireVersionError) as caught:
                old.request(m.StatusQuery(), 5)
        assert (caught.value.expected, caught.value.found) == ("1", "0")


def test_a_manifest_must_be_what_its_fingerprint_names(serve, client):
    serve()
    member = client()
    fence = member.register(writer()).fence
    with pytest.raises(ManifestError, match="fingerprint"):
        member.request(m.PutManifest(fence, FP, manifest(seed=1).encode()))
    with pytest.raises(SynclineError):
        member.request(m.PutManifest(fence, FP, pickle.dumps(Bomb())))
    blob = bytearray(manifest().encode())
    blob[len(blob) // 2] ^= 1
    with pytest.raises(ManifestError):
        member.request(m.PutManifest(fence, FP, bytes(blob)))
    member.put_manifest(fence, manifest())


def test_a_server_that_accepts_and_never_answers_is_named(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setenv("SYNCLINE_META_ENDPOINT", endpoint)
        monkeypatch.setenv("SYNCLINE_JOB_TOKEN", "t" * 32)
        began = time.monotonic()
        with MetaClient("job", QUICK) as lonely, pytest.raises(DeadlineError, match=endpoint):
            lonely.request(m.StatusQuery(), 0.5)
        assert time.monotonic() - began < 1.5


def test_metadata_is_read_without_a_training_library(process):
    """Nothing that a reader needs in order to parse a trainer's metadata imports torch or a trainer."""
    blob = manifest(tensors=3).encode()
    assert Manifest.decode(blob) == manifest(tensors=3)
    assert process("parse", blob).said() == (3, [])
