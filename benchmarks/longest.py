"""The longest sequence whose planned step fits into a GPU's memory."""

from __future__ import annotations

from typing import Any

from . import context
from .context import Kind

TRIES = 4
NEARLY = 0.99  # of what is available is all of it


def fitting(plans: dict[int, int], available: float, multiple: int) -> int:
    """Returns the length whose plan fills the memory, on the line through those of the longest two.

    Args:
        plans: planned bytes by length.
        available: bytes of memory.
        multiple: the length is rounded down to a multiple of it.
    """
    (short, less), (long, more) = sorted(plans.items())[-2:]
    slope = (more - less) / (long - short)
    return int((available - (less - slope * short)) / slope) // multiple * multiple


class Search:
    """A search with one kind; it announces its first program when it is made.

    Args:
        shop: makes programs.
        kind: how sequences are sharded.
        lengths: two or more, in ascending order; the longest two are planned first.
        available: bytes of memory.
        multiple: lengths are multiples of it.
    """

    def __init__(
        self,
        shop: context.Workshop,
        kind: Kind,
        lengths: list[int],
        available: float,
        multiple: int,
    ) -> None:
        self.shop, self.kind, self.available, self.multiple = shop, kind, available, multiple
        self.plans = {length: self._planned(length)["planned_bytes"] for length in lengths[-2:]}
        shop.step(kind, self._next())

    def row(self) -> dict[str, Any]:
        """Returns the length and the plan of just that length, or why there is none."""
        try:
            length = self._found()
            return {"q_len": length, "refused": None} | self._planned(length)
        except Exception as error:  # One's failure must not cost the others their numbers.
            return {"q_len": max(self.plans), "refused": context.said(error)}

    def _found(self) -> int:
        """Returns the longest of a few lengths whose plan fits.

        Each further one is on the line through the plans of the longest two.
        """
        for _ in range(TRIES):
            length = self._next()
            if length in self.plans:
                break
            self.plans[length] = self._planned(length)["planned_bytes"]
            if NEARLY * self.available <= self.plans[length] <= self.available:
                break
        return max(length for length, plan in self.plans.items() if plan <= self.available)

    def _next(self) -> int:
        return fitting(self.plans, self.available, self.multiple)

    def _planned(self, length: int) -> dict[str, int]:
        return context.planned_bytes(self.shop.step(self.kind, length).result())
