from __future__ import annotations

import pytest

from syncline.errors import AuthError
from syncline.meta.keys import JobKeys, hkdf_sha256


def test_hkdf_agrees_with_rfc_5869():
    # Appendix A.1, A.3
    key = bytes.fromhex("0b" * 22)
    salt, info = bytes(range(13)), bytes(range(0xF0, 0xFA))
    first = "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865"
    third = "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d9d201395faa4b61a96c8"
    assert hkdf_sha256(key, info, salt, 42).hex() == first
    assert hkdf_sha256(key, b"", b"", 42).hex() == third


def test_keys_are_a_function_of_token_and_job():
    one = JobKeys.derive(b"t" * 32, "a")
    assert one == JobKeys.derive(b"t" * 32, "a")
    others = [JobKeys.derive(b"t" * 32, "b"), JobKeys.derive(b"u" * 32, "a")]
    publics = {pair.public for keys in (one, *others) for pair in (keys.server, keys.client)}
    assert len(publics) == 6
    assert "secret" not in repr(one)


def test_a_short_token_is_refused():
    with pytest.raises(AuthError, match="too short"):
        JobKeys.derive(b"secret", "a")
