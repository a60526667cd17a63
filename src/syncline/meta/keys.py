"""CURVE keys derived from the job's token: whoever holds the token, and only they, can take part.

secret = HKDF-SHA256(token, salt "syncline/1", info "<role> of <job>") (RFC 5869), 32 bytes; public by curve
multiplication. All clients of a job share one key pair; the server has another, so a client also proves the
server to itself. The job's name is part of the derivation: one token in the environment of two jobs makes
two pairs of keys.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass, field

import zmq
from zmq.utils import z85

from syncline.errors import AuthError

_SALT = b"syncline/1"
_SHORTEST_TOKEN = 16


def hkdf_sha256(token: bytes, info: bytes, salt: bytes = _SALT, nbytes: int = 32) -> bytes:
    """Return ``nbytes`` (at most 8160) of key material: extract and expand of RFC 5869."""
    prk = hmac.new(salt, token, hashlib.sha256).digest()
    block, out = b"", b""
    for index in range(1, -(-nbytes // 32) + 1):
        block = hmac.new(prk, block + info + bytes([index]), hashlib.sha256).digest()
        out += block
    return out[:nbytes]


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A CURVE key pair in Z85, 40 bytes each."""

    public: bytes
    secret: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class JobKeys:
    """Both pairs of one job."""

    server: KeyPair
    client: KeyPair

    @classmethod
    def derive(cls, token: bytes, job: str) -> JobKeys:
        """Return the keys of ``job`` for its ``token``.

        Raises:
            AuthError: the token is too short to be a secret.
        """
        if len(token) < _SHORTEST_TOKEN:
            raise AuthError(
                "the job's token is too short",
                expected=f"at least {_SHORTEST_TOKEN} bytes",
                found=f"{len(token)} bytes",
                hint="SYNCLINE_JOB_TOKEN should be random, for example from `openssl rand -hex 32`",
            )
        return cls(_pair(token, job, "server"), _pair(token, job, "client"))


def _pair(token: bytes, job: str, role: str) -> KeyPair:
    secret = z85.encode(hkdf_sha256(token, f"{role} of {job}".encode()))
    return KeyPair(zmq.curve_public(secret), secret)
