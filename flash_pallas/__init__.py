"""Exact FlashAttention in JAX: Pallas kernels for NVIDIA Hopper GPUs, jnp for everything else."""

from typing import TYPE_CHECKING, Any

from ._lazy import module_of
from ._runtime import name_library
from ._version import __version__ as __version__
from .api import dot_product_attention as dot_product_attention
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
from .decode import flash_decode as flash_decode
from .devices import target as target
from .frontend.explain import Explanation as Explanation
from .frontend.explain import explain as explain
from .ragged import ragged_paged_attention as ragged_paged_attention
from .transforms.derivatives import save_attention as save_attention
from .tuning import Tuning as Tuning
from .tuning import autotune as autotune
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

if TYPE_CHECKING:  # type checkers import them, and so find names that do not exist
    from . import compat as compat
    from . import conformance as conformance
    from . import integrations as integrations
    from . import nn as nn
    from . import parallel as parallel
    from . import reference as reference
    from . import typing as typing

name_library()

_MODULES = ("compat", "conformance", "integrations", "nn", "parallel", "reference", "typing")
_GONE = {
    "explain_decode": "flash_decode",
    "explain_ragged": "ragged_paged_attention",
    "explain_varlen": "flash_attention_varlen",
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Imports a public module when it is asked for."""
        if name in _GONE:
            return _gone(name)
        return module_of(__name__, _MODULES, name)


def __dir__() -> list[str]:
    return sorted([*__all__, *_MODULES])


def _gone(name: str) -> Any:
    """Returns a function in place of a removed one, whose error says what to write instead."""

    def gone(*args: Any, **kwargs: Any) -> None:
        raise TypeError(
            f"there is one explain for all functions: write explain({_GONE[name]}, ...) instead of "
            f"{name}(...), and `with target(gpu):` around it instead of gpu=gpu"
        )

    return gone
