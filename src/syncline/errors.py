"""The exception tree: every error of syncline says what was expected, what came, where, and what to do."""

from __future__ import annotations

from typing import ClassVar


class SynclineError(Exception):
    """Root of the tree.

    Args:
        what: one sentence: what went wrong.
        expected: what would have been right.
        found: what came instead.
        rank: who met it, for example ``"writer 1"`` or ``"instance b, rank 2"``.
        tensor: the checkpoint name of the tensor concerned.
        hint: what the user can do about it.

    The message is composed of these parts, one a line; the parts stay readable as attributes, so that a
    program can act on them and an error that crossed a process boundary keeps them.
    """

    def __init__(
        self,
        what: str,
        *,
        expected: object = None,
        found: object = None,
        rank: object = None,
        tensor: str | None = None,
        hint: str | None = None,
    ) -> None:
        self.what, self.tensor, self.hint = what, tensor, hint
        self.expected, self.found = _text(expected), _text(found)
        self.rank = _text(rank)
        parts = [what]
        labels = ("tensor", "rank", "expected", "found", "hint")
        parts += [f"  {name}: {getattr(self, name)}" for name in labels if getattr(self, name) is not None]
        super().__init__("\n".join(parts))

    def to_wire(self) -> dict[str, str | None]:
        """Return the error as plain strings for `from_wire` in another process."""
        fields = ("what", "expected", "found", "rank", "tensor", "hint")
        return {"kind": type(self).__name__, **{name: getattr(self, name) for name in fields}}


def _text(value: object) -> str | None:
    return None if value is None else str(value)


class LayoutError(SynclineError):
    """A layout that cannot be right: bad boxes, views, names or dtypes of one side."""


class NameMismatchError(LayoutError):
    """Names that exist on one side only."""


class ShapeMismatchError(LayoutError):
    """One name, two global shapes."""


class UndeclaredCastError(LayoutError):
    """A narrowing cast that nobody declared."""


class CoverageError(LayoutError):
    """Elements without a source (a gap), or with more than one (an overlap)."""


class ManifestError(LayoutError):
    """Encoded bytes that are not a manifest, are of another version, or lie about their sizes."""


class PlanError(SynclineError):
    """A plan that cannot be made, or two sides that hold different plans."""


class ProtocolError(SynclineError):
    """A request that the protocol's rules forbid."""


class FencedError(ProtocolError):
    """The caller was superseded: an older epoch, boot, membership or attempt."""


class UnknownVersionError(ProtocolError):
    """A version that was never published, or is no longer held by anybody."""


class StaleVersionError(ProtocolError):
    """A version older than the newest sealed one, or than the one already committed."""


class VersionAbortedError(ProtocolError):
    """A writer failed before the version was sealed."""


class VersionBrokenError(ProtocolError):
    """A live source died after sealing and nobody else holds its shards."""


class RevokedError(ProtocolError):
    """The pin was revoked: what was read may be torn and must not be committed."""


class DeadlineError(SynclineError):
    """A wait ended without its event; the message names whom it waited for."""


class AuthError(SynclineError):
    """A missing or wrong job key, or a peer of another user."""


class WireVersionError(SynclineError):
    """A peer that speaks another version of the wire format."""


class TransportError(SynclineError):
    """A transfer that failed."""


class PeerLostError(TransportError):
    """The other side of a link is gone."""


class MemoryBudgetError(SynclineError):
    """Not enough memory for what is about to be allocated; nothing was touched."""


class DigestMismatchError(SynclineError):
    """Bytes that arrived are not the bytes that were published."""


class ReplicaDivergenceError(DigestMismatchError):
    """Declared replicas of one box hold different contents."""


class EffectiveMismatchError(SynclineError):
    """Live tensors differ from a fresh load of the same checkpoint."""


class AdapterError(SynclineError):
    """An engine or trainer did something its adapter must refuse: moved a pointer, changed a dtype."""


class RemoteError(SynclineError):
    """An error of a class that this process does not know, raised in another process; its text is whole."""


class _Registry:
    """Names of the tree's classes, for errors that cross processes."""

    known: ClassVar[dict[str, type[SynclineError]]] = {}


def _subclasses(root: type[SynclineError]) -> dict[str, type[SynclineError]]:
    found = {root.__name__: root}
    for child in root.__subclasses__():
        found |= _subclasses(child)
    return found


def to_wire(error: BaseException, traceback_text: str | None = None) -> dict[str, str | None]:
    """Return any exception as plain strings; foreign classes keep their name, message and traceback text."""
    if isinstance(error, SynclineError):
        return error.to_wire()
    what = f"{type(error).__name__}: {error}"
    return {"kind": "RemoteError", "what": what, "found": traceback_text}


def from_wire(fields: dict[str, str | None]) -> SynclineError:
    """Return the error that `to_wire` described; an unknown kind becomes a `RemoteError`, never an import."""
    if not _Registry.known:
        _Registry.known = _subclasses(SynclineError)
    kind = _Registry.known.get(fields.get("kind") or "", RemoteError)
    names = ("expected", "found", "rank", "tensor", "hint")
    return kind(fields.get("what") or "an error without a message", **{n: fields.get(n) for n in names})
