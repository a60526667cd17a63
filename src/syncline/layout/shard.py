"""A shard: which box of which checkpoint tensor a rank holds, where, and as what."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from syncline.errors import LayoutError
from syncline.layout.dtype import itemsize

if TYPE_CHECKING:
    from syncline.layout.box import Box
    from syncline.layout.view import View


@dataclass(frozen=True, slots=True)
class Shard:
    """One box of a checkpoint tensor in one storage of a rank.

    Attributes:
        name: the tensor's name in the checkpoint.
        global_shape: shape of the whole checkpoint tensor.
        dtype: torch's name of the stored dtype.
        box: the elements held, in coordinates of the checkpoint tensor.
        view: where they lie; ``view.size == box.size``.
        transforms: names of the transforms between checkpoint and storage, outermost first.

    Raises:
        LayoutError: the view's size is not the box's.
    """

    name: str
    global_shape: tuple[int, ...]
    dtype: str
    box: Box
    view: View
    transforms: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.view.size != self.box.size:
            raise LayoutError(
                "a view must have the size of its box",
                tensor=self.name,
                expected=self.box.size,
                found=f"{self.view.size} from nests {self.view.shape}",
            )

    @property
    def nbytes(self) -> int:
        """Bytes of the box's elements in the stored dtype."""
        return self.box.numel * itemsize(self.dtype)
