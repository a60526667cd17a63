"""Matching: names, shapes, dtypes and casts of both sides against the rules, class by class.

What comes out speaks of tensors by number, 0..T-1 in the order of their canonical names, and of ranks by the
number of their (distinct) manifest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from syncline.errors import LayoutError, PlanError, ShapeMismatchError, UndeclaredCastError
from syncline.layout.dtype import name_of
from syncline.layout.mesh import MeshLayout
from syncline.layout.transform import cast_name, transform
from syncline.plan.classes import Classes, classify
from syncline.plan.joint import Held
from syncline.plan.meshed import MeshHeld
from syncline.plan.names import Names
from syncline.plan.tables import Table, padded, table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from syncline.layout import Layout, Manifest, Rules
    from syncline.plan.columns import I32, I64, U8
    from syncline.plan.cover import Sources


@dataclass(frozen=True, slots=True)
class Side:
    """Distinct manifests, which rank has which, and what they are called in messages."""

    manifests: tuple[Manifest, ...]
    labels: tuple[str, ...]
    of_rank: Mapping[str, I32]  # instance name -> i32[ranks], number of the rank's manifest


@dataclass(frozen=True, slots=True)
class Matched:
    """Both sides in one numbering: that of all tensors, or (``reduced``) that of their classes.

    Attributes:
        names: canonical names of the synced tensors, sorted; of classes: of their first tensors.
        global_shape: i64[T, D], padded with 1.
        ndim: u8[T].
        writer_of: i32[writer ranks], index into ``writers``.
        writers: a table a distinct writer manifest; always of all tensors.
        reader_of: instance name (sorted) -> i32[ranks], index into ``readers``.
        readers: a table a distinct reader manifest.
    """

    names: tuple[str, ...]
    global_shape: I64
    ndim: U8
    writer_of: I32
    writers: tuple[Table, ...]
    reader_of: Mapping[str, I32]
    readers: tuple[Table, ...]


def match(writer: Layout | MeshLayout, readers: Mapping[str, Layout], rules: Rules) -> Matched:
    """Bring both sides into one numbering.

    Raises:
        PlanError: a side without ranks.
        NameMismatchError: names on one side only that no rule declares.
        ShapeMismatchError: one name, two global shapes.
    """
    sources = _mesh(writer) if isinstance(writer, MeshLayout) else _side({"": writer}, "writer")
    targets = _side({name: readers[name] for name in sorted(readers)}, "instance")
    names = Names(rules, [*sources.manifests, *targets.manifests])
    held = {
        name: [targets.manifests[m] for m in np.unique(ranks).tolist()]
        for name, ranks in targets.of_rank.items()
    }
    names.match(sources.manifests, held)
    shape, ndim = _global_shapes(sources, targets, names)
    depth = shape.shape[1]
    return Matched(
        names=names.synced,
        global_shape=shape,
        ndim=ndim,
        writer_of=sources.of_rank[""],
        writers=_tables(sources, names, depth),
        reader_of=targets.of_rank,
        readers=_tables(targets, names, depth),
    )


def reduced(matched: Matched, writer: Layout | MeshLayout) -> tuple[Held | MeshHeld, Classes, Matched]:
    """Return all that writers hold, the classes of tensors, and both sides in the numbering of classes."""
    held = _held(matched, writer)
    classes = classify(held, matched.readers, matched.global_shape, matched.ndim)
    small = Matched(
        names=tuple(matched.names[t] for t in classes.first.tolist()),
        global_shape=matched.global_shape[classes.first],
        ndim=matched.ndim[classes.first],
        writer_of=matched.writer_of,
        writers=matched.writers,
        reader_of=matched.reader_of,
        readers=tuple(classes.reduce(t) for t in matched.readers),
    )
    return held, classes, small


def casts(
    matched: Matched, classes: Classes, small: Matched, sources: Sources, rules: Rules
) -> tuple[tuple[str, str, str], ...]:
    """Check dtypes and transforms; return (name, source dtype, destination dtype) of every cast, sorted.

    Args:
        matched: all tensors.
        classes: of them.
        small: both sides in the numbering of classes.
        sources: what writers hold of the classes' first tensors.
        rules: what may be cast.

    Raises:
        UndeclaredCastError: a cast that is neither exact nor declared.
        LayoutError: writers that store one tensor in two dtypes; an unknown or unsupported transform.
    """
    source = _source_dtypes(small, sources)
    found: set[tuple[str, str, str]] = set()
    known = np.zeros((len(source), 256), np.bool_)  # (class, reader's dtype): allowed for every tensor of it
    for full, few in zip(matched.readers, small.readers, strict=True):
        have = source[few.tensor]
        plain = _plain_chains(few)
        open_ = (have != 0) & (((have != few.dtype) & ~known[few.tensor, few.dtype]) | ~plain)
        if open_.any():
            of_class = np.zeros(len(source), np.bool_)
            of_class[few.tensor[open_]] = True
            found |= _check_casts(matched.names, classes, full, of_class, source, rules)
            if not rules.aliases:  # else another manifest may have another name, and rules go by name
                known[few.tensor[open_ & plain], few.dtype[open_ & plain]] = True
    return tuple(sorted(found))


def _held(matched: Matched, writer: Layout | MeshLayout) -> Held | MeshHeld:
    if not isinstance(writer, MeshLayout):
        return Held.of(matched.writers, len(matched.names))
    (table,) = matched.writers
    number = np.full(writer.whole.rows, -1, np.int32)
    number[table.shards(np.arange(len(table)))] = table.tensor
    return MeshHeld(writer, number, len(matched.names), matched.global_shape.shape[1])


def _mesh(writer: MeshLayout) -> Side:
    """Return a side of which every rank has what a rule says of one manifest."""
    return Side((writer.whole,), ("writer 0",), {"": np.arange(writer.ranks, dtype=np.int32)})


def _side(layouts: Mapping[str, Layout], kind: str) -> Side:
    number: dict[bytes, int] = {}
    manifests: list[Manifest] = []
    labels: list[str] = []
    of_rank: dict[str, I32] = {}
    if not layouts:
        raise PlanError("a plan needs at least one reader instance")
    for name, layout in layouts.items():
        if not layout.manifests:
            raise PlanError("a side without ranks", rank=f"instance {name}" if name else kind)
        ranks = np.zeros(len(layout.manifests), np.int32)
        for rank, manifest in enumerate(layout.manifests):
            ranks[rank] = number.setdefault(manifest.fingerprint, len(manifests))
            if ranks[rank] == len(manifests):
                manifests.append(manifest)
                labels.append(f"{kind} {name}, rank {rank}" if name or kind != "writer" else f"{kind} {rank}")
        of_rank[name] = ranks
    return Side(tuple(manifests), tuple(labels), of_rank)


def _global_shapes(sources: Side, targets: Side, names: Names) -> tuple[I64, U8]:
    """Return (shape i64[T, D], ndim u8[T]), told alike by everybody."""
    told: list[tuple[str, Manifest, I32]] = []
    seen: set[tuple[int, bytes]] = set()
    for side in (sources, targets):
        for label, manifest in zip(side.labels, side.manifests, strict=True):
            numbered = names.of(manifest)
            if (key := (id(numbered), manifest.shapes_key)) not in seen:
                seen.add(key)
                told.append((label, manifest, numbered.number))
    depth = max((manifest.global_shape.shape[1] for _, manifest, _ in told), default=1)
    whole = [m for _, m, number in told if len(number) == len(names.synced) and names.of(m).same]
    if whole:
        shape, ndim = padded(whole[0].global_shape, depth, 1), whole[0].ndim
        if _agree(told, shape, ndim):
            return shape, ndim
    tensor = np.concatenate([number for *_, number in told])
    mine = np.concatenate([padded(manifest.global_shape, depth, 1) for _, manifest, _ in told])
    ranks = np.concatenate([manifest.ndim for _, manifest, _ in told])
    if not (tensor >= 0).all():
        tensor, mine, ranks = tensor[tensor >= 0], mine[tensor >= 0], ranks[tensor >= 0]
    shape = np.ones((len(names.synced), depth), np.int64)
    ndim = np.zeros(len(names.synced), np.uint8)
    shape[tensor[::-1]], ndim[tensor[::-1]] = mine[::-1], ranks[::-1]  # the first one to tell is written last
    differs = ndim[tensor] != ranks
    for d in range(depth):
        differs |= shape[:, d].take(tensor) != mine[:, d]
    if differs.any():
        row = int(np.argmax(differs))
        t, n = int(tensor[row]), int(ranks[row])
        said = [label for label, _, number in told if t in number]
        owner = np.repeat(np.arange(len(told)), [np.count_nonzero(number >= 0) for *_, number in told])
        raise ShapeMismatchError(
            "one name, two global shapes",
            tensor=names.synced[t],
            rank=told[int(owner[row])][0],
            expected=f"{tuple(shape[t, : int(ndim[t])].tolist())}, as {said[0]} says",
            found=tuple(mine[row, :n].tolist()),
        )
    return shape, ndim


def _agree(told: Sequence[tuple[str, Manifest, I32]], shape: I64, ndim: U8) -> bool:
    """Return whether everybody tells these shapes of all tensors."""
    others = [(m, number) for _, m, number in told if m.global_shape is not shape]
    if not others:
        return True
    tensor = np.concatenate([number for _, number in others])
    kept = tensor >= 0
    same = ~kept | (ndim[tensor] == np.concatenate([m.ndim for m, _ in others]))
    for d in range(shape.shape[1]):
        mine = [m.global_shape[:, d] for m, _ in others if m.global_shape.shape[1] > d]
        if len(mine) < len(others):
            return False
        same &= ~kept | (shape[:, d].take(tensor) == np.concatenate(mine))
    return bool(same.all())


def _tables(side: Side, names: Names, depth: int) -> tuple[Table, ...]:
    pairs = zip(side.manifests, side.labels, strict=True)
    return tuple(table(manifest, names.of(manifest), label, depth) for manifest, label in pairs)


def _source_dtypes(small: Matched, sources: Sources) -> U8:
    """Return u8[C]: the dtype in which the writers store each class, 0 where nobody holds an element."""
    for held in small.writers:
        _refuse_transforms(held.manifest, held.label)
    found = np.zeros(len(small.names), np.uint8)
    order = np.argsort(-sources.manifest, kind="stable")
    found[sources.tensor[order]] = sources.dtype[order]  # the first manifest is written last
    differs = found[sources.tensor] != sources.dtype
    if differs.any():
        row = int(np.argmax(np.where(differs, -sources.manifest, -len(small.writers))))
        t = int(sources.tensor[row])
        first = int(sources.manifest[sources.tensor == t].min())
        raise LayoutError(
            "writers store one tensor in two dtypes",
            tensor=small.names[t],
            rank=small.writers[int(sources.manifest[row])].label,
            expected=f"{name_of(int(found[t]))}, as {small.writers[first].label}",
            found=name_of(int(sources.dtype[row])),
        )
    return found


def _refuse_transforms(manifest: Manifest, label: str) -> None:
    for number, chain in enumerate(manifest.transform_names):
        if not chain:
            continue
        tensor = manifest.names[int(manifest.tensor[np.argmax(manifest.transforms == number)])]
        for name in chain:
            transform(name, tensor)
        raise PlanError(
            "a writer's shard that needs a transform cannot be sent",
            tensor=tensor,
            rank=label,
            expected="shards in checkpoint values",
            found=" then ".join(chain),
        )


def _plain_chains(held: Table) -> np.ndarray:
    """Return bool[M]: whether each segment is stored without a transform."""
    plain = np.array([not chain for chain in held.manifest.transform_names], np.bool_)
    if plain.all():
        return np.ones(len(held), np.bool_)
    return plain[held.manifest.transforms[held.shards(np.arange(len(held)))]]


def _check_casts(
    names: Sequence[str],
    classes: Classes,
    held: Table,
    of_class: np.ndarray,
    source: U8,
    rules: Rules,
) -> set[tuple[str, str, str]]:
    """Check a reader's segments of some classes, one by one: rules go by name."""
    found: set[tuple[str, str, str]] = set()
    manifest, done = held.manifest, set()
    rows = np.nonzero(of_class[classes.of[held.tensor]])[0]
    for row, shard in zip(rows.tolist(), held.shards(rows).tolist(), strict=True):
        t, code = int(held.tensor[row]), int(held.dtype[row])
        own = manifest.names[int(manifest.tensor[shard])]
        chain = manifest.transform_names[int(manifest.transforms[shard])]
        if (t, code, own, chain) in done:
            continue
        done.add((t, code, own, chain))
        src, dst = name_of(int(source[classes.of[t]])), name_of(code)
        if not _allowed(rules, (own, names[t]), src, dst, chain):
            raise UndeclaredCastError(
                "a cast that nobody declared",
                tensor=own,
                rank=held.label,
                expected=f"{src}, as the writers store it, or a dtype that widens it exactly",
                found=dst,
                hint=f'declare it: Rules(casts={{"{own}": "{dst}"}}), or casts="reader" for all',
            )
        if src != dst:
            found.add((names[t], src, dst))
    return found


def _allowed(rules: Rules, names: tuple[str, str], src: str, dst: str, chain: tuple[str, ...]) -> bool:
    """Return whether rules or the reader's own declared transform allow the cast.

    Raises:
        LayoutError: a transform that nobody registered.
        PlanError: a transform that is not the cast from the writer's to the reader's dtype.
    """
    if not chain:
        return any(rules.cast_allowed(name, src, dst) for name in names)
    for name in chain:
        transform(name, names[0])
    if chain != (cast_name(src, dst),):
        raise PlanError(
            "a reader's shard that needs a transform cannot be fed",
            tensor=names[0],
            expected=f"no transform, or {cast_name(src, dst)}",
            found=" then ".join(chain),
        )
    return True
