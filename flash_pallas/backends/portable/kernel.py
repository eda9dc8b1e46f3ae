"""What every kernel here works with."""

from __future__ import annotations

from .products import Products
from .team import Team
from .tiles import Copies


class Kernel:
    """Base of the dataclasses whose methods are the phases of a block.

    Attributes:
        interpret: run by the interpreter.
    """

    interpret: bool

    @property
    def hides_offsets(self) -> bool:
        """See Copies."""
        return True

    @property
    def products(self) -> Products:
        """How tiles are multiplied."""
        return Products(self.interpret)

    @property
    def copies(self) -> Copies:
        """How a warpgroup that is alone moves tiles."""
        return Copies(self.interpret, Team(self.interpret), self.hides_offsets)
