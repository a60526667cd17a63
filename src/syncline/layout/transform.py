"""Transforms between a checkpoint tensor and what is stored, and the rules of what a user allows.

A layout names its transforms; what a name means is registered here, with a numpy reference that every kernel
is compared with, bit for bit. Casts between floating-point dtypes are registered by syncline itself.
"""

from __future__ import annotations

import fnmatch
import hashlib
import re
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from syncline import extensions
from syncline.errors import LayoutError
from syncline.layout import cast
from syncline.layout.dtype import dtype, widens

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from numpy.typing import NDArray

    Reference = Callable[[NDArray[Any]], NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Transform:
    """A declared change of values between two dtypes, element by element.

    Attributes:
        name: what layouts call it; unique.
        src: torch's name of the dtype it reads.
        dst: torch's name of the dtype it writes.
        exact: whether every source value survives, so that the inverse gives back the same bits.
        reference: numpy function from raw elements of ``src`` to raw elements of ``dst``, as
            `syncline.layout.cast.raw_dtype` describes raw elements; of the same shape.
    """

    name: str
    src: str
    dst: str
    exact: bool
    reference: Reference


_registry: dict[str, Transform] = {}


def register_transform(transform: Transform) -> Transform:
    """Make a transform known by its name and return it.

    Raises:
        LayoutError: the name is taken by another transform, or a dtype is unknown.
    """
    dtype(transform.src)
    dtype(transform.dst)
    known = _registry.setdefault(transform.name, transform)
    if known is not transform:
        raise LayoutError(
            f"the transform {transform.name!r} is registered already",
            expected="a name of its own",
            found=known,
            hint="choose a name with the package as its prefix",
        )
    return transform


def transform(name: str, tensor: str | None = None) -> Transform:
    """Return a registered transform.

    Args:
        name: as in `Shard.transforms`.
        tensor: the checkpoint name to put into the error.

    Raises:
        LayoutError: nobody registered it.
    """
    found = _registry.get(name) or _plugged_in().get(name)
    if found is None:
        broken = extensions.installed.broken(extensions.TRANSFORMS)
        raise LayoutError(
            f"unknown transform {name!r}",
            tensor=tensor,
            expected=f"one of {', '.join(sorted(_registry))}",
            found=name,
            hint="call syncline.layout.register_transform before connecting"
            + (f"; broken plug-ins: {', '.join(sorted(broken))}" if broken else ""),
        )
    return found


def cast_name(src: str, dst: str) -> str:
    """Return the name of the cast between two dtypes, for example ``cast:float32->bfloat16``."""
    return f"cast:{src}->{dst}"


def cast_transform(src: str, dst: str, tensor: str | None = None) -> Transform:
    """Return the declared transform that casts ``src`` to ``dst``.

    Raises:
        LayoutError: no such cast exists (for example from an integer to a float).
    """
    return transform(cast_name(src, dst), tensor)


def has_cast(src: str, dst: str) -> bool:
    """Return whether a cast between two different dtypes is registered."""
    name = cast_name(src, dst)
    return name in _registry or name in _plugged_in()


def _plugged_in() -> Mapping[str, Transform]:
    """Return all transforms, those of packages' entry points ``syncline.transforms`` included."""
    extensions.installed.once(extensions.TRANSFORMS, _take)
    return _registry


def _take(offer: Any) -> None:
    made: Any = offer() if callable(offer) and not isinstance(offer, Transform) else offer
    for one in (made,) if isinstance(made, Transform) else made or ():
        register_transform(one)


for _src, _dst in cast.pairs():
    register_transform(
        Transform(cast_name(_src, _dst), _src, _dst, widens(_src, _dst), cast.reference(_src, _dst))
    )


@dataclass(frozen=True)
class Rules:
    """What a user allows beyond "both sides hold the same names in the same dtypes". Patterns are fnmatch's.

    Attributes:
        casts: which tensors may be narrowed, to which dtype: ``{pattern: dtype}``, the first pattern that
            matches a name decides; or ``"reader"``: whatever the reader's dtype is. Exact widening needs no
            rule.
        frozen: reader tensors that nobody sends: local to the reader, or never trained.
        extras: writer tensors that no reader wants.
        aliases: other names of a tensor, ``{name: canonical name}``; both sides' names are replaced before
            they are matched, so that an untied copy is fed from the tensor it is tied to elsewhere.

    Raises:
        LayoutError: an unknown dtype, or an alias of an alias.
    """

    casts: Mapping[str, str] | Literal["reader"] = field(default_factory=dict, hash=False)
    frozen: tuple[str, ...] = ()
    extras: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if isinstance(self.casts, str):
            if self.casts != "reader":
                raise LayoutError("casts is neither a mapping nor 'reader'", found=self.casts)
        else:
            object.__setattr__(self, "casts", dict(self.casts))
            for name in self.casts.values():
                dtype(name)
        object.__setattr__(self, "frozen", _patterns(self.frozen, "frozen"))
        object.__setattr__(self, "extras", _patterns(self.extras, "extras"))
        object.__setattr__(self, "aliases", dict(self.aliases))
        for name, canonical in self.aliases.items():
            if canonical in self.aliases:
                raise LayoutError(
                    "an alias of an alias",
                    tensor=name,
                    expected="a canonical name",
                    found=f"{canonical}, itself an alias of {self.aliases[canonical]}",
                )

    def cast_allowed(self, name: str, src: str, dst: str) -> bool:
        """Return whether tensor ``name`` may be stored as ``src`` by a writer and as ``dst`` by a reader.

        Equal dtypes are; exact widening is; any other cast that exists is when ``casts`` says exactly so.
        """
        if src == dst:
            return True
        if not has_cast(src, dst):
            return False
        if widens(src, dst) or self.casts == "reader":
            return True
        return self._declared(name) == dst

    def is_frozen(self, name: str) -> bool:
        """Return whether a reader's tensor stays as it is."""
        return self._frozen_match(name) is not None

    def is_extra(self, name: str) -> bool:
        """Return whether no reader has to want a writer's tensor."""
        return self._extra_match(name) is not None

    def canonical(self, name: str) -> str:
        """Return the name under which a tensor is matched."""
        return self.aliases.get(name, name)

    @cached_property
    def fingerprint(self) -> bytes:
        """16 bytes over all rules; the order of ``casts`` counts, since the first match decides."""
        casts = (
            [self.casts] if isinstance(self.casts, str) else [x for pair in self.casts.items() for x in pair]
        )
        aliases = [x for pair in sorted(self.aliases.items()) for x in pair]
        state = hashlib.blake2b(digest_size=16)
        for part in (casts, sorted(set(self.frozen)), sorted(set(self.extras)), aliases):
            state.update(len(part).to_bytes(8, "little"))
            for text in part:
                data = text.encode()
                state.update(len(data).to_bytes(8, "little") + data)
        return state.digest()

    @cached_property
    def _frozen_match(self) -> Callable[[str], object]:
        return _compile(self.frozen)

    @cached_property
    def _extra_match(self) -> Callable[[str], object]:
        return _compile(self.extras)

    @cached_property
    def _cast_patterns(self) -> list[tuple[Callable[[str], object], str]]:
        if isinstance(self.casts, str):
            return []
        return [(_compile([pattern]), kind) for pattern, kind in self.casts.items()]

    def _declared(self, name: str) -> str | None:
        return next((kind for match, kind in self._cast_patterns if match(name)), None)


def _patterns(value: Iterable[str], what: str) -> tuple[str, ...]:
    if isinstance(value, str):
        raise LayoutError(f"{what} is one pattern", expected="a sequence of patterns", found=value)
    return tuple(value)


def _compile(patterns: Iterable[str]) -> Callable[[str], object]:
    """Return one matcher for all patterns: a name is scanned once, however many rules there are."""
    joined = "|".join(f"(?:{fnmatch.translate(pattern)})" for pattern in patterns)
    return re.compile(joined).match if joined else lambda _: None
