"""Static schedule of ring attention: the work of a device in every step of the ring.

Step s brings the keys of the device s places before this one. These are the keys of `me - s`, or
after wrapping around those of `me - s + P`, which come later in the sequence. In both cases the
distances between queries and keys are known, except between an early and a late chunk of the zigzag
layout.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from ..core.mask import Mask

EMPTY, FULL, PARTIAL = "empty", "full", "partial"


class Piece(NamedTuple):
    """One attention call: some queries of this device and some keys of another.

    Attributes:
        rows: the half of the queries, 0 or 1, or None for all.
        cols: the half of the keys, 0 or 1, or None for all.
        mask: mask in terms of positions; trivial if everything is visible.
        offset: position of the first query relative to the first key, unless `far`.
        far: 1 for late queries and early keys, and -1 for the reverse; their distance depends on
            the device. Otherwise 0.
    """

    rows: int | None
    cols: int | None
    mask: Mask
    offset: int = 0
    far: int = 0


@dataclasses.dataclass(frozen=True)
class Plan:
    """Geometry of a ring.

    Attributes:
        shards: number of devices of the ring.
        length: length of one device's part of the sequence.
        zigzag: True for the zigzag layout. Otherwise every device has consecutive tokens.
        mask: mask of the whole attention call.
    """

    shards: int
    length: int
    zigzag: bool
    mask: Mask

    @property
    def last_step(self) -> int:
        """The last step in which any device has work."""
        return max(s for s in range(self.shards) if self.pieces(s, False) or self.pieces(s, True))

    def pieces(self, step: int, wrapped: bool) -> list[Piece]:
        """Returns the pieces of a step for devices whose step has `wrapped` around, or has not."""
        if wrapped and not step:
            return []
        ahead = step - self.shards if wrapped else step  # this device's number minus the other's
        return self._zigzag_pieces(ahead) if self.zigzag else self._piece(None, None, ahead)

    def far_distance(self, ahead: int, me):
        """Returns the distance from the late chunk of device `me` to the early chunk of another.

        The other device is the one `ahead` places before it.
        """
        return (2 * self.shards - 1 - 2 * me + ahead) * (self.length // 2)

    def _piece(self, rows, cols, chunks: int) -> list[Piece]:
        """Returns the piece of queries that lie this many chunks after the keys; [] if empty."""
        size = self.length if rows is None else self.length // 2
        offset = chunks * size
        kind = self._kind(offset, offset, size)
        mask = Mask() if kind == FULL else self.mask
        return [] if kind == EMPTY else [Piece(rows, cols, mask, offset if kind == PARTIAL else 0)]

    def _zigzag_pieces(self, ahead: int) -> list[Piece]:
        early, late = self._piece(0, 0, ahead), self._piece(1, 1, -ahead)
        first, last = max(0, ahead), min(self.shards, self.shards + ahead) - 1
        ends = [self.far_distance(ahead, me) for me in (last, first)]
        before, after = self._far(1, 0, 1, ends), self._far(0, 1, -1, ends)
        full = lambda pieces: bool(pieces) and pieces[0].mask.is_trivial
        if ahead == 0 and self.mask == Mask.causal():
            return [Piece(None, None, self.mask)]  # positions grow along one device's tokens
        if all(map(full, (early, late, before, after))):
            return [Piece(None, None, Mask())]
        if full(early) and full(before) and not (late or after):
            return [Piece(None, 0, Mask())]
        if full(late) and full(before) and not (early or after):
            return [Piece(1, None, Mask())]
        return early + late + before + after

    def _far(self, rows, cols, sign: int, ends) -> list[Piece]:
        """Returns the piece of chunks whose distance lies between two ends, times the sign."""
        low, high = sorted(sign * end for end in ends)
        kind = self._kind(low, high, self.length // 2)
        if kind == EMPTY:
            return []
        return [
            Piece(rows, cols, Mask()) if kind == FULL else Piece(rows, cols, self.mask, 0, sign)
        ]

    def _kind(self, low: int, high: int, size: int) -> str:
        """Classifies two chunks whose queries lie `low` to `high` positions after the keys.

        Returns EMPTY, FULL or PARTIAL.
        """
        left, right = self.mask.left, self.mask.right
        reach = lambda offset: (-(offset + size - 1), size - 1 - offset)  # key minus query position
        nearest, furthest = reach(low), reach(high)
        behind = right is not None and furthest[0] > right
        before = left is not None and nearest[1] < -left
        if behind or before:
            return EMPTY
        whole_right = right is None or nearest[1] <= right
        whole_left = left is None or furthest[0] >= -left
        return FULL if whole_right and whole_left else PARTIAL
