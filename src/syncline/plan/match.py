"""Matching: whose tensor is whose. Names, aliases, shapes, dtypes and casts of both sides against the rules.

This is the one place where aliases are applied. What comes out speaks of tensors by number, 0..T-1 in the
order of their canonical names, and of ranks by the number of their (distinct) manifest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from syncline.errors import LayoutError, NameMismatchError, PlanError, ShapeMismatchError, UndeclaredCastError
from syncline.layout.dtype import name_of
from syncline.layout.transform import cast_name, transform
from syncline.plan.columns import changes, distinct, lex_order

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from syncline.layout import Layout, Manifest, Rules
    from syncline.plan.columns import I32, I64, U8

_SAMPLES = 5


@dataclass(frozen=True, slots=True)
class Table:
    """The segments of one manifest in the plan's numbering, by tensor; unmatched tensors are left out.

    Attributes:
        tensor: i32[M], number in the plan.
        dtype: u8[M], code of the stored dtype.
        offset, size: i64[M, D], the segment's box.
        storage: i32[M].
        base: i64[M], storage element of the corner.
        stride: i64[M, D], in elements.
        shard: i32[M], row of the manifest.
        whole: whether every segment is a whole shard.
        label: who holds it, for messages.
    """

    tensor: I32
    dtype: U8
    offset: I64
    size: I64
    storage: I32
    base: I64
    stride: I64
    shard: I32
    whole: bool
    label: str

    def __len__(self) -> int:
        return len(self.tensor)


@dataclass(frozen=True, slots=True)
class Side:
    """Distinct manifests, which rank has which, and what they are called in messages."""

    manifests: tuple[Manifest, ...]
    labels: tuple[str, ...]
    of_rank: Mapping[str, I32]  # instance name -> i32[ranks], number of the rank's manifest


@dataclass(frozen=True, slots=True)
class Matched:
    """Both sides in one numbering.

    Attributes:
        names: canonical names of the synced tensors, sorted.
        global_shape: i64[T, D], padded with 1.
        ndim: u8[T].
        writer_of: i32[writer ranks], index into ``writers``.
        writers: a table a distinct writer manifest.
        reader_of: instance name (sorted) -> i32[ranks], index into ``readers``.
        readers: a table a distinct reader manifest.
        casts: (name, source dtype, destination dtype), sorted: every cast the plan makes.
    """

    names: tuple[str, ...]
    global_shape: I64
    ndim: U8
    writer_of: I32
    writers: tuple[Table, ...]
    reader_of: Mapping[str, I32]
    readers: tuple[Table, ...]
    casts: tuple[tuple[str, str, str], ...]


def match(writer: Layout, readers: Mapping[str, Layout], rules: Rules) -> Matched:
    """Bring both sides into one numbering.

    Raises:
        PlanError: a side without ranks.
        NameMismatchError: names on one side only that no rule declares.
        ShapeMismatchError: one name, two global shapes.
        UndeclaredCastError: a cast that is neither exact nor declared.
        LayoutError: writers that store one tensor in two dtypes; an unknown or unsupported transform.
    """
    sources = _side({"": writer}, "writer")
    targets = _side({name: readers[name] for name in sorted(readers)}, "instance")
    names = _Names(rules)
    synced = _match_names(sources, targets, names, rules)
    index = {name: i for i, name in enumerate(synced)}
    for manifest in (*sources.manifests, *targets.manifests):
        names.number(manifest.names, index)
    shape, ndim = _global_shapes(sources, targets, names, synced)
    source_dtype = _source_dtypes(sources, names, synced)
    casts = _check_casts(targets, names, synced, source_dtype, rules)
    depth = shape.shape[1]
    return Matched(
        names=synced,
        global_shape=shape,
        ndim=ndim,
        writer_of=sources.of_rank[""],
        writers=tuple(_tables(sources, names, depth)),
        reader_of=targets.of_rank,
        readers=tuple(_tables(targets, names, depth)),
        casts=casts,
    )


class _Names:
    """Canonical names of manifests' name tables. Many manifests share one table: each is looked at once."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._canonical: dict[tuple[str, ...], tuple[str, ...]] = {}
        self._numbers: dict[tuple[str, ...], I32] = {}

    def canonical(self, names: tuple[str, ...]) -> tuple[str, ...]:
        found = self._canonical.get(names)
        if found is None:
            rename = self._rules.canonical
            found = self._canonical[names] = tuple(map(rename, names)) if self._rules.aliases else names
        return found

    def number(self, names: tuple[str, ...], index: Mapping[str, int]) -> I32:
        """Return i32: each name's tensor number, -1 for names that are not synced."""
        found = self._numbers.get(names)
        if found is None:
            numbers = (index.get(name, -1) for name in self.canonical(names))
            found = self._numbers[names] = np.fromiter(numbers, np.int32, len(names))
        return found

    def of(self, manifest: Manifest) -> I32:
        return self._numbers[manifest.names]


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


def _match_names(sources: Side, targets: Side, names: _Names, rules: Rules) -> tuple[str, ...]:
    sent = _union(sources.manifests, names)
    wanted: set[str] = set()
    checked: set[frozenset[tuple[str, ...]]] = set()
    for instance, ranks in targets.of_rank.items():
        held = [targets.manifests[m] for m in sorted(set(ranks.tolist()))]
        tables = frozenset(m.names for m in held)
        if tables in checked:
            continue
        checked.add(tables)
        own = _union(held, names)
        missing = [name for name in own - sent if not rules.is_frozen(name)]
        unwanted = [name for name in sent - own if not rules.is_extra(name)]
        if missing or unwanted:
            raise _name_error(instance, sent, own, missing, unwanted)
        wanted |= own
    return tuple(sorted(sent & wanted))


def _union(manifests: Iterable[Manifest], names: _Names) -> set[str]:
    tables = {manifest.names for manifest in manifests}
    return set().union(*(names.canonical(table) for table in tables))


def _name_error(
    instance: str, sent: set[str], own: set[str], missing: list[str], unwanted: list[str]
) -> NameMismatchError:
    found = []
    if unwanted:
        found.append(f"{len(unwanted)} sent names that no rank wants, {_samples(unwanted)}")
    if missing:
        found.append(f"{len(missing)} reader names that nobody sends, {_samples(missing)}")
    counts = f"received {len(sent)}, applied {len(sent & own)}, missing {len(missing)}"
    return NameMismatchError(
        f"names on one side only: {counts}",
        tensor=min(missing or unwanted),
        rank=f"instance {instance}",
        expected="the same names on both sides",
        found="; ".join(found),
        hint="declare what is meant: Rules(extras=[...]) for sent names that nobody wants, frozen=[...] for "
        "reader names that nobody sends, aliases={name: canonical name} for tied tensors",
    )


def _samples(names: list[str]) -> str:
    shown = ", ".join(sorted(names)[:_SAMPLES])
    return f"e.g. {shown}" + (", ..." if len(names) > _SAMPLES else "")


def _global_shapes(sources: Side, targets: Side, names: _Names, synced: tuple[str, ...]) -> tuple[I64, U8]:
    sides = [(side, m) for side in (sources, targets) for m in range(len(side.manifests))]
    depth = max((side.manifests[m].global_shape.shape[1] for side, m in sides), default=1)
    shape = np.ones((len(synced), depth), np.int64)
    ndim = np.zeros(len(synced), np.uint8)
    owner = np.full(len(synced), -1, np.int64)
    for at, (side, m) in enumerate(sides):
        manifest = side.manifests[m]
        tensor = names.of(manifest)
        rows = np.nonzero(tensor >= 0)[0]
        mine = _padded(manifest.global_shape[rows], depth, 1)
        tensor = tensor[rows]
        fresh = owner[tensor] < 0
        shape[tensor[fresh]], ndim[tensor[fresh]] = mine[fresh], manifest.ndim[rows[fresh]]
        owner[tensor[fresh]] = at
        differs = (shape[tensor] != mine).any(axis=1) | (ndim[tensor] != manifest.ndim[rows])
        if differs.any():
            row = int(np.argmax(differs))
            t, n = int(tensor[row]), int(manifest.ndim[rows[row]])
            first_side, first = sides[int(owner[t])]
            raise ShapeMismatchError(
                "one name, two global shapes",
                tensor=synced[t],
                rank=side.labels[m],
                expected=f"{tuple(shape[t, : int(ndim[t])].tolist())}, as {first_side.labels[first]} says",
                found=tuple(mine[row, :n].tolist()),
            )
    return shape, ndim


def _padded(rows: I64, depth: int, fill: int) -> I64:
    return np.pad(rows, ((0, 0), (0, depth - rows.shape[1])), constant_values=fill)


def _source_dtypes(sources: Side, names: _Names, synced: tuple[str, ...]) -> U8:
    """Return u8[T]: the dtype in which the writers store each tensor, 0 where nobody holds an element."""
    found = np.zeros(len(synced), np.uint8)
    owner = np.zeros(len(synced), np.int64)
    for m, manifest in enumerate(sources.manifests):
        _refuse_transforms(manifest, sources.labels[m])
        segments = manifest.segments()
        tensor = names.of(manifest)[segments.tensor]
        rows = np.nonzero(tensor >= 0)[0]
        tensor, dtype = tensor[rows], segments.dtype[rows]
        fresh = found[tensor] == 0
        found[tensor[fresh]], owner[tensor[fresh]] = dtype[fresh], m
        differs = found[tensor] != dtype
        if differs.any():
            row = int(np.argmax(differs))
            t = int(tensor[row])
            raise LayoutError(
                "writers store one tensor in two dtypes",
                tensor=synced[t],
                rank=sources.labels[m],
                expected=f"{name_of(int(found[t]))}, as {sources.labels[int(owner[t])]}",
                found=name_of(int(dtype[row])),
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


def _check_casts(
    targets: Side, names: _Names, synced: tuple[str, ...], source: U8, rules: Rules
) -> tuple[tuple[str, str, str], ...]:
    casts: set[tuple[str, str, str]] = set()
    known = np.zeros((len(synced), 256), np.bool_)  # (tensor, reader's dtype) allowed by the canonical name
    for m, manifest in enumerate(targets.manifests):
        segments = manifest.segments()
        tensor = names.of(manifest)[segments.tensor]
        chain = manifest.transforms[segments.shard]
        plain = np.array([not c for c in manifest.transform_names], np.bool_)[chain]
        have = np.where(tensor >= 0, source[tensor], 0)
        open_ = (have != 0) & (((have != segments.dtype) & ~known[tensor, segments.dtype]) | ~plain)
        for row in np.nonzero(open_)[0].tolist():
            t, code = int(tensor[row]), int(segments.dtype[row])
            if known[t, code] and plain[row]:
                continue
            own = manifest.names[int(segments.tensor[row])]
            src, dst = name_of(int(have[row])), name_of(code)
            if not _allowed(rules, (own, synced[t]), src, dst, manifest.transform_names[int(chain[row])]):
                raise UndeclaredCastError(
                    "a cast that nobody declared",
                    tensor=own,
                    rank=targets.labels[m],
                    expected=f"{src}, as the writers store it, or a dtype that widens it exactly",
                    found=dst,
                    hint=f'declare it: Rules(casts={{"{own}": "{dst}"}}), or casts="reader" for all',
                )
            known[t, code] = rules.cast_allowed(synced[t], src, dst)
            if src != dst:
                casts.add((synced[t], src, dst))
    return tuple(sorted(casts))


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


def _tables(side: Side, names: _Names, depth: int) -> Iterable[Table]:
    for manifest, label in zip(side.manifests, side.labels, strict=True):
        yield _table(manifest, names.of(manifest), label, depth)


def _table(manifest: Manifest, number: I32, label: str, depth: int) -> Table:
    s = manifest.segments()
    tensor = number[s.tensor]
    whole = not bool((s.shard[1:] == s.shard[:-1]).any())
    if (tensor < 0).any() or (tensor[1:] < tensor[:-1]).any():
        kept = np.nonzero(tensor >= 0)[0]
        kept = kept[np.argsort(tensor[kept], kind="stable")]
    else:
        kept = np.arange(len(tensor))
    wide = (_padded(s.offset, depth, 0), _padded(s.size, depth, 1), _padded(s.stride, depth, 0))
    columns: list[Any] = [tensor, s.dtype, wide[0], wide[1], s.storage, s.base, wide[2], s.shard]
    if number.size and len(distinct(number[number >= 0])) < np.count_nonzero(number >= 0):
        kept = _once(kept, columns)  # aliases: one view under two names is one view
    return Table(*(c[kept] for c in columns), whole=whole, label=label)


def _once(rows: I64, columns: list[Any]) -> I64:
    """Return the rows without exact repetitions: the same box of a tensor in the same memory."""
    keys = [c[rows] for c in columns[:-1]]
    order = lex_order(*keys)
    first = changes(*(k[order] for k in keys))
    return rows[np.sort(order[first])]
