"""Exact FlashAttention in JAX: Pallas kernels for NVIDIA Hopper GPUs, jnp for everything else."""

from .api import dot_product_attention as dot_product_attention
from .api import explain as explain
from .api import flash_attention as flash_attention
from .api import flash_attention_with_lse as flash_attention_with_lse
from .api import flash_attention_with_max_logit as flash_attention_with_max_logit
from .backends.base import UnsupportedByBackend as UnsupportedByBackend
from .dispatch import Explanation as Explanation
from .vjp import save_attention as save_attention

__all__ = [
    "Explanation",
    "UnsupportedByBackend",
    "dot_product_attention",
    "explain",
    "flash_attention",
    "flash_attention_with_lse",
    "flash_attention_with_max_logit",
    "save_attention",
]
