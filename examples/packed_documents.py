"""Packs documents of different lengths into rows of one length, so that none sees another.

Run: python examples/packed_documents.py
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from flash_pallas.nn import segment_positions
from flash_pallas.nn.nnx import FlashAttention

ROW, FEATURES = 256, 64
PADDING = -1


def pack(lengths):
    """Returns segment ids int32 [rows, ROW]; a document goes into the first row that has room."""
    rows = []
    for document, length in enumerate(lengths):
        row = next((row for row in rows if len(row) + length <= ROW), None)
        if row is None:
            row = []
            rows.append(row)
        row += [document] * length
    return np.array([row + [PADDING] * (ROW - len(row)) for row in rows], np.int32)


lengths = np.random.default_rng(0).integers(20, 200, 12)
ids = pack(lengths)
documents = [
    jax.random.normal(key, (length, FEATURES))
    for key, length in zip(jax.random.split(jax.random.key(0), len(lengths)), lengths, strict=True)
]
tokens = jnp.zeros((*ids.shape, FEATURES))
for document, x in enumerate(documents):
    tokens = tokens.at[np.nonzero(ids == document)].set(x)

layer = FlashAttention(
    4, FEATURES, num_kv_heads=2, causal=True, rope_theta=10_000.0, rngs=nnx.Rngs(0)
)
# The ids are data: every packing runs the same compiled program.
attend = nnx.jit(lambda layer, x, ids: layer(x, segment_ids=ids, positions=segment_positions(ids)))
packed = attend(layer, tokens, jnp.asarray(ids))
furthest = max(
    float(jnp.abs(packed[np.nonzero(ids == document)] - layer(x)).max())
    for document, x in enumerate(documents)
)
print(f"{len(lengths)} documents in {len(ids)} rows of {ROW}, {np.mean(ids < 0):.0%} padding")
print(f"furthest from the documents alone: {furthest:.1e}")
