"""Exact FlashAttention in JAX: Pallas kernels for NVIDIA Hopper GPUs, jnp for everything else."""

from ._version import __version__ as __version__
from .api import dot_product_attention as dot_product_attention
from .api import explain as explain
from .api import flash_attention as flash_attention
from .api import flash_attention_with_lse as flash_attention_with_lse
from .api import flash_attention_with_max_logit as flash_attention_with_max_logit
from .backends.base import UnsupportedByBackend as UnsupportedByBackend
from .cache import KVCache as KVCache
from .cache import append_kv as append_kv
from .cache import append_ragged_kv as append_ragged_kv
from .cache import check_pages as check_pages
from .cache import gather_pages as gather_pages
from .core.block_mask import BlockMask as BlockMask
from .core.rope import apply_rope as apply_rope
from .decode import explain_decode as explain_decode
from .decode import flash_decode as flash_decode
from .devices import target as target
from .frontend.dispatch import Explanation as Explanation
from .ragged import explain_ragged as explain_ragged
from .ragged import ragged_paged_attention as ragged_paged_attention
from .transforms.derivatives import save_attention as save_attention
from .tuning import Tuning as Tuning
from .tuning import autotune as autotune
from .varlen import explain_varlen as explain_varlen
from .varlen import flash_attention_varlen as flash_attention_varlen

__all__ = [
    "BlockMask",
    "Explanation",
    "KVCache",
    "Tuning",
    "UnsupportedByBackend",
    "append_kv",
    "append_ragged_kv",
    "apply_rope",
    "autotune",
    "check_pages",
    "dot_product_attention",
    "explain",
    "explain_decode",
    "explain_ragged",
    "explain_varlen",
    "flash_attention",
    "flash_attention_varlen",
    "flash_attention_with_lse",
    "flash_attention_with_max_logit",
    "flash_decode",
    "gather_pages",
    "ragged_paged_attention",
    "save_attention",
    "target",
]
