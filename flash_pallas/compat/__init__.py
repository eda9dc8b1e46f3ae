"""Functions with the names, layouts and conventions of other attention libraries.

Each module has those of one library, for JAX arrays. They translate arguments and call
`flash_attention`, `flash_attention_varlen`, `flash_decode` or `ragged_paged_attention`. They refuse
what these functions cannot do.
"""

from . import flash_attn as flash_attn
from . import flex as flex
from . import ragged_paged_attention as ragged_paged_attention
from . import splash as splash
from . import torch_sdpa as torch_sdpa

__all__ = ["flash_attn", "flex", "ragged_paged_attention", "splash", "torch_sdpa"]
