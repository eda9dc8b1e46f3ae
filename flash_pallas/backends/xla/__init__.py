"""Attention one block at a time in jnp: any device, any float dtype, every feature.

backend   the two passes over the tiles
decode    a few queries against a cache, contiguous or paged
online    one step of the online softmax
tiles     between two matmuls: score modifiers, masking, their gradients
grid      how a call is cut into tiles, and which tiles are read
"""

from .backend import XlaBackend
from .grid import XlaBlocks

__all__ = ["XlaBackend", "XlaBlocks"]
