"""Who holds what, compared over all trainer ranks: one owner for each element, and no element without one.

A checkpoint box may be held by many ranks, but only by ranks that differ in nothing that cuts the model:
replicas of data parallelism, and of tensor parallelism where a parameter is not cut. Two pipeline stages, or
two expert-parallel ranks, that hold the same elements would be two truths.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec
import zstandard

from syncline.errors import AdapterError, CoverageError
from syncline.layout.box import Box

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

MAX_BYTES = 256 << 20


class Claim(msgspec.Struct, frozen=True, array_like=True):
    """One checkpoint tensor as one rank holds it.

    Attributes:
        name: the checkpoint name.
        shape: of the whole checkpoint tensor.
        boxes: held elements: (offset, size) each.
        kind: ``dense``: cut by pipeline stages; ``expert``: by expert-parallel ranks, too; ``shared``: a
            declared copy of another stage's, with the same contents.
    """

    name: str
    shape: tuple[int, ...]
    boxes: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    kind: str


class Claims(msgspec.Struct, frozen=True, array_like=True):
    """All claims of one rank.

    Attributes:
        rank: among the trainers.
        stage: its pipeline stage.
        expert_rank: its expert-parallel rank.
        claims: one a checkpoint tensor.
        aliases: second names of tied tensors.
        error: why this rank has no claims, as `syncline.errors.to_wire` says it: all ranks then fail alike.
        quantised: how tensors are quantised here, if that is agreed upon with other ranks.
    """

    rank: int
    stage: int
    expert_rank: int
    claims: tuple[Claim, ...]
    aliases: dict[str, str] = {}
    error: dict[str, str | None] | None = None
    quantised: str = ""

    def encode(self) -> bytes:
        """Return the claims as compressed msgpack."""
        return zstandard.compress(msgspec.msgpack.encode(self), 3)

    @classmethod
    def decode(cls, data: bytes) -> Claims:
        """Decode `encode`.

        Raises:
            AdapterError: bytes that are not claims.
        """
        try:
            plain = zstandard.ZstdDecompressor().decompress(data, max_output_size=MAX_BYTES)
            return msgspec.msgpack.decode(plain, type=cls)
        except (zstandard.ZstdError, msgspec.MsgspecError) as error:
            raise AdapterError("a trainer rank sent bytes that are not its claims", found=error) from error


def check(everyone: Sequence[Claims], required: Iterable[str] = ()) -> None:
    """Check that every element of every claimed tensor has exactly one owner.

    Args:
        everyone: the claims of all ranks.
        required: checkpoint names that must be claimed.

    Raises:
        AdapterError: two owners of the same elements, two shapes of one tensor, or two ways of quantising.
        CoverageError: elements that nobody owns, a required tensor included.
    """
    for one in everyone:
        if one.quantised != everyone[0].quantised:
            raise AdapterError(
                "trainer ranks quantise differently",
                expected=everyone[0].quantised or "nothing that is agreed upon",
                found=one.quantised or "nothing that is agreed upon",
                rank=f"writer {one.rank}",
                hint="give MegatronTrainer(..., fp8=...) the same on every rank",
            )
    aliases = {alias: name for one in everyone for alias, name in one.aliases.items()}
    seen: dict[str, _Tensor] = {}
    for rank in everyone:
        for claim in rank.claims:
            name = aliases.get(claim.name, claim.name)
            seen.setdefault(name, _Tensor(name, claim.shape)).add(rank, claim)
    for tensor in seen.values():
        tensor.check()
    for name in required:
        if aliases.get(name, name) not in seen:
            raise CoverageError(
                "a checkpoint tensor that no trainer rank owns",
                expected="one owner",
                found=f"{len(everyone)} ranks, none of which exports it",
                tensor=name,
                hint="does every pipeline stage and expert-parallel rank have a writer?",
            )


class _Tensor:
    """The claims of one checkpoint tensor."""

    def __init__(self, name: str, shape: tuple[int, ...]) -> None:
        self.name, self.shape = name, shape
        self._owner: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[tuple[int, ...], int]] = {}

    def add(self, rank: Claims, claim: Claim) -> None:
        if claim.shape != self.shape:
            raise AdapterError(
                "trainer ranks disagree about a checkpoint tensor's shape",
                expected=self.shape,
                found=claim.shape,
                rank=rank.rank,
                tensor=self.name,
                hint="is the model cut alike on every rank?",
            )
        owner = () if claim.kind == "shared" else (rank.stage,)
        if claim.kind == "expert":
            owner = rank.stage, rank.expert_rank
        for box in claim.boxes:
            known = self._owner.get(box)
            if known is None or not known[0]:
                self._owner[box] = owner, rank.rank
            elif owner and known[0] != owner:
                raise self._two(known, owner, rank.rank)

    def _two(self, known: tuple[tuple[int, ...], int], owner: tuple[int, ...], rank: int) -> AdapterError:
        stages = known[0][0] != owner[0]
        what = "two pipeline stages claim one tensor" if stages else "two owners of one expert"
        return AdapterError(
            what,
            expected=f"rank {known[1]} alone, {_described(known[0])}",
            found=f"rank {rank} as well, {_described(owner)}",
            rank=rank,
            tensor=self.name,
            hint="layer or expert numbers do not follow from the model's own: check offsets of stages",
        )

    def check(self) -> None:
        """Check that the distinct boxes tile the tensor."""
        covered = sum(math.prod(size) for _, size in self._owner)
        if covered == math.prod(self.shape):
            return
        boxes = [Box(offset, size) for offset, size in self._owner]
        ranks = sorted({rank for _, rank in self._owner.values()})
        gap = covered < math.prod(self.shape)
        raise CoverageError(
            "elements of a checkpoint tensor that no trainer rank owns"
            if gap
            else "trainer ranks claim overlapping boxes of a checkpoint tensor",
            expected=f"all of {self.shape}, once",
            found=f"{boxes[:4]} of ranks {ranks[:8]}",
            tensor=self.name,
            hint="does every rank of the model have a writer, and do sizes divide?",
        )


def _described(owner: tuple[int, ...]) -> str:
    text = f"stage {owner[0]}"
    return text if len(owner) == 1 else f"{text}, expert-parallel rank {owner[1]}"
