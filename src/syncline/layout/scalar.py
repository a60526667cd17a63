"""Numbers that stand for values nobody has: what ``item()`` of a weightless tensor returns while tracing.

Such a number crosses torch's C++ as a plain float and loses its class; it is recognised on the other side by
its bits, a NaN with a payload. In Python it refuses to be looked at.
"""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable

_TAG = 0x7FFA5C00  # a quiet NaN; the lower 32 bits are the number


def number_of(value: float) -> int | None:
    """Return the number of a traced scalar, or None for any other float."""
    if not math.isnan(value):
        return None
    tag, number = divmod(struct.unpack("<Q", struct.pack("<d", value))[0], 1 << 32)
    return number if tag == _TAG else None


class TracedScalar(float):
    """The value of a traced one-element tensor; may be passed to torch, and to nothing else."""

    what: str
    refuse: Callable[[str, object], Exception]

    @classmethod
    def make(cls, number: int, what: str, refuse: Callable[[str, object], Exception]) -> TracedScalar:
        """Return the scalar of a number; ``what`` names its tensor, ``refuse`` makes the error of misuse."""
        scalar = cls(struct.unpack("<d", struct.pack("<Q", (_TAG << 32) | number))[0])
        scalar.what, scalar.refuse = what, refuse
        return scalar

    def __repr__(self) -> str:
        return f"<the value of {self.what}>"

    def __str__(self) -> str:
        return repr(self)

    def __format__(self, spec: str) -> str:
        return repr(self)


def _refuser(operation: str) -> Callable[..., NoReturn]:
    def refused(self: TracedScalar, *_: Any) -> NoReturn:
        found = f"{operation} of item() of {self.what}"
        raise self.refuse("a loader decides by, or calculates with, the value of a weight", found)

    return refused


_REFUSED = (
    *("abs", "add", "and", "bool", "ceil", "divmod", "eq", "float", "floor", "floordiv", "ge", "gt", "hash"),
    *("index", "int", "invert", "le", "lt", "mod", "mul", "ne", "neg", "pos", "pow", "radd", "rdivmod"),
    *("rfloordiv", "rmod", "rmul", "round", "rpow", "rsub", "rtruediv", "sub", "truediv", "trunc"),
)
for _name in _REFUSED:
    setattr(TracedScalar, f"__{_name}__", _refuser(_name))
