"""What a checkpoint holds, without its bytes: from its files' headers, or from the writers' manifests."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from syncline.errors import AdapterError
from syncline.layout.dtype import BY_CODE
from syncline.layout.loader import Spec
from syncline.protocol import messages as m
from syncline.store import join
from syncline.store.member import Member

if TYPE_CHECKING:
    from pathlib import Path

    from syncline.layout.manifest import Manifest
    from syncline.options import Options

MAX_HEADER = 100 << 20
"""Largest header that is read, in bytes: safetensors' own bound."""

_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
}


def from_directory(directory: Path) -> dict[str, Spec]:
    """Return every tensor that a directory's safetensors files hold; nothing if it has none.

    Source of the format: the safetensors specification (eight little-endian bytes of length, then JSON).

    Raises:
        AdapterError: a file that is not one, or a dtype that nobody here knows.
    """
    found: dict[str, Spec] = {}
    for path in sorted(directory.glob("*.safetensors")):
        for name, entry in _header(path).items():
            if name == "__metadata__":
                continue
            if entry["dtype"] not in _DTYPES:
                raise AdapterError(
                    "a checkpoint tensor of a dtype that is not known", found=entry["dtype"], tensor=name
                )
            found[name] = Spec(tuple(entry["shape"]), _DTYPES[entry["dtype"]])
    return found


def from_writers(job: str, table: str, options: Options) -> dict[str, Spec]:
    """Return every tensor that the writers of a table hold; waits until all of them are there.

    Raises:
        DeadlineError: they did not come within ``connect_timeout``; names whoever is missing.
    """
    with Member(job, f"table {table}, layout", options) as member:
        fence = join.as_guest(member, table, "layout")
        wait = options.connect_timeout
        members: m.Members = member.ask(m.AwaitMembers(fence, table, wait), wait)
        found: dict[str, Spec] = {}
        for writer in members.writers:
            found |= of_manifest(member.client.get_manifest(fence, writer.manifest_fp))
    return found


def of_manifest(manifest: Manifest) -> dict[str, Spec]:
    """Return the checkpoint tensors of which a manifest holds a part, in the dtype that it holds."""
    dtypes = dict(zip(manifest.tensor.tolist(), manifest.dtype.tolist(), strict=True))
    found: dict[str, Spec] = {}
    for number, name in enumerate(manifest.names):
        shape = manifest.global_shape[number, : int(manifest.ndim[number])].tolist()
        found[name] = Spec(tuple(shape), BY_CODE[dtypes[number]].name)
    return found


def _header(path: Path) -> dict[str, dict[str, list[int]]]:
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if not 0 < size <= MAX_HEADER:
            raise AdapterError("not a safetensors file", expected=f"a header of at most {MAX_HEADER} bytes")
        try:
            return json.loads(file.read(size))
        except ValueError as error:
            raise AdapterError("not a safetensors file", found=f"{path.name}: {error}") from error
