"""cuDNN's attention, called through the public `jax.nn.dot_product_attention`.

`backend` says what it takes and calls it; `empty_rows` finds the queries that see no key.
"""

from __future__ import annotations

from .backend import OLDEST as OLDEST
from .backend import CudnnBackend as CudnnBackend
