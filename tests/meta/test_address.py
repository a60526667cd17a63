from __future__ import annotations

import socket

import pytest

from syncline.errors import SynclineError
from syncline.meta import JobDir, MetaServer, address


@pytest.mark.parametrize(
    ("bind", "shown"), [("127.0.0.1", "tcp://127.0.0.1:"), ("::1", "tcp://[::1]:"), ("localhost", "tcp://")]
)
def test_a_client_reaches_a_server_bound_to(serve, client, bind, shown):
    server = serve("job", bind)
    assert server.endpoint.startswith(shown)
    member = client()
    member.connect()
    assert member.endpoint == server.endpoint


@pytest.mark.parametrize("bind", ["0.0.0.0", "::"])  # noqa: S104 - wildcards are the point
def test_a_wildcard_is_advertised_as_an_address(serve, client, bind):
    server = serve("job", bind)
    host, _ = address.parse(server.endpoint)
    assert not address.is_wildcard(host)
    client().connect()


def test_an_address_that_is_not_ours_is_named():
    with pytest.raises(SynclineError, match=r"192\.0\.2\.1"):
        MetaServer("job", "192.0.2.1").start()
    with pytest.raises(SynclineError, match="does not resolve"):
        MetaServer("job", "no-such-host.invalid").start()
    JobDir.create("job").claim_server().release()  # a failed start leaves the job free


def test_a_taken_port_names_port_and_option():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SynclineError, match=f"port {port} .option port=") as caught:
            MetaServer("job", port=port).start()
    assert "--port" in str(caught.value)


def test_a_former_port_that_was_taken_meanwhile_is_no_obstacle(serve):
    first = serve()
    first.stop()
    _, port = address.parse(first.endpoint)
    with socket.create_server(("127.0.0.1", port)):
        second = serve()
        assert second.endpoint != first.endpoint
    assert second.boot == 2


def test_a_restart_comes_back_to_its_port(serve):
    first = serve()
    first.stop()
    assert serve().endpoint == first.endpoint


def test_four_jobs_start_at_once(process):
    peers = [process("server", f"job{n}") for n in range(4)]
    endpoints = [peer.said()[0] for peer in peers]
    assert len(set(endpoints)) == 4
    assert endpoints == [JobDir.open(f"job{n}").endpoint() for n in range(4)]


@pytest.mark.parametrize(
    "text", ["", "tcp://", "tcp://a:0", "tcp://a:65536", "udp://a:1", "tcp://a:1\n", "tcp://::1:5"]
)
def test_what_is_no_endpoint(text):
    with pytest.raises(SynclineError, match="not an endpoint"):
        address.parse(text)
