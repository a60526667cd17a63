"""What the MetaServer refuses to store: bytes under a wrong name, damaged, or more than it can hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncline.errors import ManifestError, ProtocolError
from syncline.layout import Manifest
from syncline.protocol.ids import blob_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from syncline.protocol import messages as m

_MAX_NBYTES = 1 << 30  # of all manifests, and of all bindings


def check_manifest(held: Mapping[bytes, bytes], request: m.PutManifest, max_bytes: int) -> None:
    """Refuse a manifest that is damaged, lies about its name, or is one too many.

    Args:
        held: manifests by fingerprint.
        request: with the new one.
        max_bytes: that a manifest may have, decoded.

    Raises:
        ManifestError: not the manifest that its fingerprint names.
        ProtocolError: too many.
    """
    if request.manifest_fp in held:
        return
    _check_room("manifests", map(len, held.values()), request.blob)
    found = Manifest.decode(request.blob, max_bytes=max_bytes).fingerprint
    if found != request.manifest_fp:
        raise ManifestError(
            "a manifest is not the one that its fingerprint names",
            expected=request.manifest_fp.hex(),
            found=found.hex(),
        )


def check_binding(held: Iterable[int], request: m.PutBinding) -> None:
    """Refuse a binding under another name than its own, or one too many; ``held`` are sizes in bytes."""
    _check_room("bindings", held, request.blob)
    if blob_name(request.blob) != request.binding_fp:
        raise ManifestError("a binding is not the one that its hash names", found=request.binding_fp.hex())


def _check_room(what: str, held: Iterable[int], blob: bytes) -> None:
    total = sum(held) + len(blob)
    if total > _MAX_NBYTES:
        raise ProtocolError(
            f"the MetaServer holds too many {what}",
            expected=f"at most {_MAX_NBYTES} bytes",
            found=f"{total} bytes",
        )
