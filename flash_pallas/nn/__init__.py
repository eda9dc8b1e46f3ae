"""Flax integration.

`attention_fn` and `causal_attention_fn` plug into Flax's own attention modules. Neither they nor
the helpers import Flax. The layers live in `flash_pallas.nn.linen` and `flash_pallas.nn.nnx`, which
are imported on request.
"""

from typing import TYPE_CHECKING, Any

from .._lazy import module_of
from ._cached import RingCache, ScaledCache
from ._options import alibi_slopes, segment_positions
from .attention_fn import attention_fn, causal_attention_fn

__all__ = [
    "RingCache",
    "ScaledCache",
    "alibi_slopes",
    "attention_fn",
    "causal_attention_fn",
    "segment_positions",
]

_MODULES = ("linen", "nnx")  # they import Flax

if TYPE_CHECKING:
    from . import linen as linen
    from . import nnx as nnx
else:

    def __getattr__(name: str) -> Any:
        return module_of(__name__, _MODULES, name)


def __dir__() -> list[str]:
    return sorted([*__all__, *_MODULES])
