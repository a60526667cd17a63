"""Addresses: literals to bind, bracketed endpoints to connect to, never one where the other belongs."""

from __future__ import annotations

import ipaddress
import re
import socket

from syncline.errors import SynclineError

# Documentation addresses: connecting a datagram socket picks a route and sends nothing.
_ROUTE_PROBES = {4: (socket.AF_INET, "192.0.2.1"), 6: (socket.AF_INET6, "2001:db8::1")}
_ENDPOINT = re.compile(r"tcp://(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<name>[^\s:/\[\]]+)):(?P<port>\d{1,5})")
_LAST_PORT = 65535


def endpoint(host: str, port: int | str) -> str:
    """Return ``tcp://host:port``, an IPv6 address in brackets."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def parse(text: str) -> tuple[str, int]:
    """Return host (without brackets) and port of an endpoint.

    Raises:
        SynclineError: not ``tcp://HOST:PORT``, or a wildcard address, to which nobody can connect.
    """
    match = _ENDPOINT.fullmatch(text)
    if match is None or not 0 < int(match["port"]) <= _LAST_PORT:
        raise SynclineError(
            "not an endpoint", expected="tcp://HOST:PORT, an IPv6 HOST in brackets", found=repr(text)
        )
    host = match["v6"] or match["name"]
    if is_wildcard(host):
        raise SynclineError(
            "a wildcard is an address to bind, not one to connect to",
            found=text,
            hint="name a host that the clients can reach",
        )
    return host, int(match["port"])


def resolve(host: str) -> str:
    """Return the literal IP address of ``host``, which may be a name or an address (brackets allowed).

    Raises:
        SynclineError: the name does not resolve.
    """
    bare = host.removeprefix("[").removesuffix("]")
    if _literal(bare) is not None:
        return bare
    try:
        found = socket.getaddrinfo(bare, None, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise SynclineError(
            f"the address {host!r} does not resolve", found=error, hint="pass an IP address as bind="
        ) from error
    return str(found[0][4][0])


def is_wildcard(host: str) -> bool:
    """Whether ``host`` means every interface (0.0.0.0 or ::)."""
    literal = _literal(host)
    return literal is not None and literal.is_unspecified


def connectable(bound: str) -> str:
    """Return an address of this host that others can connect to, for a socket bound to ``bound``."""
    if not is_wildcard(bound):
        return bound
    version = 6 if ":" in bound else 4
    family, probe = _ROUTE_PROBES[version]
    with socket.socket(family, socket.SOCK_DGRAM) as route:
        try:
            route.connect((probe, 9))
        except OSError:  # no route out of this machine: its own processes are all who can come
            return "::1" if version == 6 else "127.0.0.1"
        return str(route.getsockname()[0])


def _literal(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
