"""Base class of every kernel here: its copies and matmuls."""

from __future__ import annotations

from .mma import Matmuls
from .smem_tiles import Copies
from .team import Team


class Kernel:
    """Base class of the dataclasses whose methods are the phases of a CTA.

    Attributes:
        interpret: run under the interpreter.
    """

    interpret: bool

    @property
    def hides_offsets(self) -> bool:
        """Value of Copies.hides_offsets."""
        return True

    @property
    def products(self) -> Matmuls:
        """Matmuls of tiles."""
        return Matmuls(self.interpret)

    @property
    def copies(self) -> Copies:
        """Copies of tiles by a warpgroup that is alone in its CTA."""
        return Copies(self.interpret, Team(self.interpret), self.hides_offsets)
