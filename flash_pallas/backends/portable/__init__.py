"""Mosaic GPU kernels on `mma.sync`, `ldmatrix` and `cp.async`: compute capability 8.0 and above.

backend.py                 interface to the rest of the package
blocks.py limits.py        tile sizes; requirements on operands
forward.py                 O and the log-sum-exp
decode.py                  a few queries against a KV cache; decode_blocks.py tile sizes and splits,
                           decode_rows.py rows of queries and results
online.py row_sums.py      softmax of rows whose keys come block by block
folding.py shared_rows.py  how P reaches the warps that accumulate O
key_stream.py              copies of K and V in the forward
fused.py                   backward in one launch; passing.py its loads, dq_sums.py accumulation of
                           dQ, fused_blocks.py tile sizes
dkv.py dq.py               backward with the same bits in every run; stream.py its loads
backward_arrays.py keys.py what the backward kernels have in common
walk.py                    which blocks a tile loops over
inputs.py                  inputs of score modifiers
layouts.py                 shared memory of a CTA of each kernel
tiles.py products.py       its tiles, copies, matmuls; kernel.py: base class of every kernel
grid.py                    which part of a product each warp computes
vectors.py threads.py      copies of vectors; where threads are and what they run
team.py                    the warpgroups of a CTA
"""

from __future__ import annotations

from .backend import PortableBackend as PortableBackend
