"""Flax integration.

`attention_fn` and `causal_attention_fn` plug into Flax's own attention modules and need no import
of Flax. The layers live in `flash_pallas.nn.linen` and `flash_pallas.nn.nnx`, imported on request.
"""

from .attention_fn import attention_fn, causal_attention_fn

__all__ = ["attention_fn", "causal_attention_fn"]
