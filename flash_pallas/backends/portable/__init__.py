"""Compute capability 8.0 and above: Mosaic GPU kernels on `mma.sync`, `ldmatrix` and `cp.async`.

backend.py                 what the rest of the package sees
blocks.py limits.py        tile sizes; what operands have to be like
forward.py                 O and the log-sum-exp
decode.py                  a few queries against a cache; decode_blocks.py how it is cut,
                           decode_rows.py queries and results
online.py row_sums.py      softmax of rows whose keys come block by block
folding.py shared_rows.py  how weights reach the warps that add to O
key_stream.py              the keys of the forward, on their way
fused.py                   gradients in one launch; passing.py what it loads, dq_sums.py how it adds
                           dQ up, fused_blocks.py tile sizes
dkv.py dq.py               gradients, the same bits in every run; stream.py what they load
backward_arrays.py keys.py what kernels of gradients have in common
walk.py                    which blocks a tile goes through
inputs.py                  what modifiers of scores read
layouts.py                 what a block of each kernel allocates of shared memory
tiles.py products.py       its tiles, copies, products; kernel.py: every kernel has them
grid.py                    which part of a product each warp has
vectors.py threads.py      copies of vectors; where threads are and what they run
team.py                    the warpgroups of a block
"""

from __future__ import annotations

from .backend import PortableBackend as PortableBackend
