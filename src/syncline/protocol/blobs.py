"""What the protocol keeps and hands on without reading it, by name: manifests and bindings.

Both are put once and then only named: a version names the binding it was put under, so that an update before
which nothing moved carries no addresses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncline.protocol.core import Blob, Core, Member, Waiting
from syncline.protocol.replies import BindingBlob, Done, ManifestBlob

if TYPE_CHECKING:
    from syncline.protocol import requests as req

MAX_MANIFESTS = 64  # beyond this, those that nobody refers to are dropped


def put_manifest(core: Core, _member: Member, request: req.PutManifest, _until: float) -> Done:
    """Store an encoded manifest; identical ranks share one."""
    core.manifests[request.manifest_fp] = request.blob
    if len(core.manifests) > MAX_MANIFESTS:
        used = {member.manifest_fp for member in core.members.values()} | {request.manifest_fp}
        for table in core.tables.values():
            for version in table.versions.values():
                used |= {place.manifest_fp for place in version.puts.values()}
                used |= {rank.manifest_fp for one in version.memberships[-1] for rank in one.ranks}
        core.manifests = {fp: blob for fp, blob in core.manifests.items() if fp in used}
    return Done()


def get_manifest(
    core: Core, _member: Member, request: req.GetManifest, _until: float
) -> ManifestBlob | Waiting:
    """Answer once somebody has stored the manifest."""
    blob = core.manifests.get(request.manifest_fp)
    if blob is None:
        owners = sorted(one.who for one in core.members.values() if one.manifest_fp == request.manifest_fp)
        return Waiting(
            f"the manifest {request.manifest_fp.hex()} of {', '.join(owners) or 'nobody registered'}"
        )
    return ManifestBlob(request.manifest_fp, blob)


def put_binding(core: Core, member: Member, request: req.PutBinding, _until: float) -> Done:
    """Store a writer's binding, and drop its older ones that no version names any more."""
    named = {
        place.binding_fp
        for table in core.tables.values()
        for version in table.versions.values()
        for place in version.puts.values()
    }
    core.bindings = {
        fp: one
        for fp, one in core.bindings.items()
        if fp in named or (one.owner != member.number and one.owner in core.members)
    }
    core.bindings[request.binding_fp] = Blob(member.number, request.blob)
    return Done()


def get_binding(core: Core, _member: Member, request: req.GetBinding, _until: float) -> BindingBlob | Waiting:
    """Answer once its writer has stored the binding."""
    found = core.bindings.get(request.binding_fp)
    if found is None:
        return Waiting(f"the binding {request.binding_fp.hex()}, from the writer whose version names it")
    return BindingBlob(request.binding_fp, found.blob)
