"""What each side allows, on the wire and merged: a plan needs one set of rules, whoever declared what."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

from syncline.errors import LayoutError
from syncline.layout import Rules

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

MAX_BYTES = 1 << 20


class _RulesWire(msgspec.Struct, array_like=True, frozen=True):
    casts: dict[str, str] | Literal["reader"]
    frozen: tuple[str, ...]
    extras: tuple[str, ...]
    aliases: dict[str, str]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_RulesWire).decode


def encode(rules: Rules) -> bytes:
    """Return the rules as msgpack; empty rules are empty bytes."""
    if rules == Rules():
        return b""
    casts: dict[str, str] | Literal["reader"] = "reader" if rules.casts == "reader" else dict(rules.casts)
    return _encode(_RulesWire(casts, rules.frozen, rules.extras, dict(rules.aliases)))


def decode(blob: bytes) -> Rules:
    """Decode `encode`.

    Raises:
        LayoutError: not rules, or larger than `MAX_BYTES`.
    """
    if not blob:
        return Rules()
    if len(blob) > MAX_BYTES:
        raise LayoutError("rules larger than any sensible ones", expected=MAX_BYTES, found=len(blob))
    try:
        wire = _decode(blob)
    except msgspec.MsgspecError as error:
        raise LayoutError("bytes that are not rules", found=error) from error
    return Rules(wire.casts, wire.frozen, wire.extras, wire.aliases)


def merge(parts: Iterable[Rules]) -> Rules:
    """Return what any of the parts allows.

    Raises:
        LayoutError: two parts give one pattern, or one alias, two meanings.
    """
    everything = list(parts)
    casts: dict[str, str] = {}
    aliases: dict[str, str] = {}
    for rules in everything:
        if not isinstance(rules.casts, str):
            _add(casts, rules.casts, "a cast pattern has two dtypes")
        _add(aliases, rules.aliases, "an alias has two canonical names")
    by_reader = any(rules.casts == "reader" for rules in everything)
    return Rules(
        "reader" if by_reader else casts,
        tuple(dict.fromkeys(p for rules in everything for p in rules.frozen)),
        tuple(dict.fromkeys(p for rules in everything for p in rules.extras)),
        aliases,
    )


def _add(into: dict[str, str], more: Mapping[str, str], complaint: str) -> None:
    for key, value in more.items():
        if into.setdefault(key, value) != value:
            raise LayoutError(complaint, tensor=key, expected=into[key], found=value)
