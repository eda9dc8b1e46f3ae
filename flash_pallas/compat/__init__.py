"""Functions with the names, layouts and conventions of other attention libraries.

Each module has those of one library, for JAX arrays. They translate arguments and call
`flash_attention`, `flash_attention_varlen`, `flash_decode` or `ragged_paged_attention`. They refuse
what these functions cannot do.
"""

from typing import TYPE_CHECKING, Any

from .._lazy import module_of

__all__ = ["flash_attn", "flex", "ragged_paged_attention", "splash", "torch_sdpa"]

if TYPE_CHECKING:
    from . import flash_attn as flash_attn
    from . import flex as flex
    from . import ragged_paged_attention as ragged_paged_attention
    from . import splash as splash
    from . import torch_sdpa as torch_sdpa
else:

    def __getattr__(name: str) -> Any:
        return module_of(__name__, tuple(__all__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
