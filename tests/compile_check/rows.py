"""What is compiled: every kernel that a user's call can reach, as that call reaches it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from flash_pallas.backends.hopper import HopperBackend
from flash_pallas.core.mask import Mask
from flash_pallas.core.problem import AttentionSpec, Cotangents, Operands, describe

BATCH, LENGTH, Q_HEADS, KV_HEADS = 2, 2048, 8, 4

# How a call masks: (causal, length of q and k, q_offset traced).
MASKS = {
    "full": (False, LENGTH, False),
    "causal": (True, LENGTH, False),
    "ragged": (False, LENGTH - 40, False),  # the last block of keys is masked
    "offset": (True, LENGTH - 40, True),  # causal from an offset that is an array, and ragged
}

# Bytes of spill stores per thread that ship knowingly, by (kernel, head dim, mask); 0 for all
# others. Figures of ptxas 13.5. They are addresses, not accumulators, and wgmma is serialised in
# none; the figures in benchmarks/results were taken with them.
ALLOWED_SPILLS = {
    ("flash_pallas_forward", 128, "full"): 32,
    ("flash_pallas_forward", 128, "causal"): 8,
    ("flash_pallas_forward", 128, "ragged"): 32,
    ("flash_pallas_forward", 128, "offset"): 20,
    ("flash_pallas_backward_fused", 64, "full"): 28,
    ("flash_pallas_backward_fused", 64, "causal"): 44,
    ("flash_pallas_backward_fused", 64, "ragged"): 32,
    ("flash_pallas_backward_fused", 64, "offset"): 48,
    ("flash_pallas_backward_fused", 128, "full"): 4,
}


@dataclasses.dataclass(frozen=True)
class Row:
    """One call of the backend.

    Attributes:
        path: "forward", "backward" or "deterministic backward".
        head_dim: of q, k and v.
        dtype: "bfloat16" or "float16".
        mask: one of MASKS.
        function, arguments: what to compile.
    """

    path: str
    head_dim: int
    dtype: str
    mask: str
    function: Callable
    arguments: tuple[Any, ...]

    def __str__(self) -> str:
        return f"{self.path} {self.head_dim} {self.dtype} {self.mask}"


def _row(path: str, head_dim: int, dtype: str, mask: str) -> Row:
    causal, length, traced = MASKS[mask]
    spec = AttentionSpec(
        scale=head_dim**-0.5,
        mask=Mask(right=0) if causal else Mask(),
        deterministic=path == "deterministic backward",
    )
    q = jax.ShapeDtypeStruct((BATCH, length, Q_HEADS, head_dim), dtype)
    kv = jax.ShapeDtypeStruct((BATCH, length, KV_HEADS, head_dim), dtype)
    offset = jax.ShapeDtypeStruct((BATCH,), jnp.int32) if traced else None
    per_row = jax.ShapeDtypeStruct((BATCH, Q_HEADS, length), jnp.float32)
    operands = Operands(q, kv, kv, offset)
    backend = HopperBackend()
    blocks = backend.blocks(describe(operands, spec), None)
    if path == "forward":
        run, arguments = (lambda *a: backend.forward(spec, blocks, *a)), (operands,)
    else:
        run = lambda *a: backend.backward(spec, blocks, *a, wanted=frozenset())
        arguments = (operands, Cotangents(per_row, q, per_row))
    return Row(path, head_dim, dtype, mask, run, arguments)


def rows() -> Iterator[Row]:
    """All rows; masks other than full and causal in bfloat16 alone, whose code is the same."""
    for head_dim, path in itertools.product((64, 128, 256), ("forward", "backward")):
        for dtype, mask in itertools.product(("bfloat16", "float16"), MASKS):
            if dtype == "float16" and mask not in ("full", "causal"):
                continue
            yield _row(path, head_dim, dtype, mask)
            # Head dim 256 has one backward, which is deterministic.
            if path == "backward" and head_dim < 256:
                yield _row("deterministic backward", head_dim, dtype, mask)
