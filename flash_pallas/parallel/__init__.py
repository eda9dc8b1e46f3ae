"""Context parallelism: attention to sequences that are sharded over devices."""

from .context import context_parallel_attention as context_parallel_attention
from .context import sharded_attention as sharded_attention
from .layout import from_zigzag as from_zigzag
from .layout import to_zigzag as to_zigzag
from .layout import zigzag_positions as zigzag_positions
from .setting import ContextParallel as ContextParallel

__all__ = [
    "ContextParallel",
    "context_parallel_attention",
    "from_zigzag",
    "sharded_attention",
    "to_zigzag",
    "zigzag_positions",
]


def __dir__() -> list[str]:
    return sorted(__all__)
