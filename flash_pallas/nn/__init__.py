"""Flax integration.

`attention_fn` and `causal_attention_fn` plug into Flax's own attention modules and need no import
of Flax, nor do the helpers. The layers live in `flash_pallas.nn.linen` and `flash_pallas.nn.nnx`,
imported on request.
"""

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
