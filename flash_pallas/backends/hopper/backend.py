"""The Hopper kernels as a backend: what they take, and how arrays are padded for them."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...core.integers import round_up
from ...core.problem import AttentionSpec, Cotangents, Grads, Operands, Outputs, Problem, describe
from ...core.softmax import EMPTY_ROW
from .arrays import BackwardArrays
from .backward_dkv import dkv
from .backward_dq import dq
from .backward_fused import backward_fused
from .blocks import NATIVE_HEAD_DIMS, HopperBlocks, choose_blocks, native_head_dim
from .forward import forward
from .fused_blocks import FusedBlocks
from .memory import pad_axis

DTYPES = (np.dtype(jnp.bfloat16), np.dtype(jnp.float16))
LENGTH_MULTIPLE = 8  # rows of a swizzled TMA tile: an array's length must be a multiple of it
ROW_MULTIPLE = 128  # of lse and delta in the backward: the widest query tile
FEATURES = frozenset({"q_offset"})  # operands that the kernels read, beside q, k and v
MAX_GRID = 65_535  # CUDA's limit on the second and third grid dimension
H200_SMS = 132  # assumed where there is no GPU to ask: H100 SXM and H200


@dataclasses.dataclass(frozen=True)
class HopperBackend:
    """Kernels for H100 and H200.

    Attributes:
        interpret: run on CPU under the Mosaic GPU interpreter, with race detection (for tests).
        num_sms: multiprocessors to spread persistent kernels over; None asks the device.
    """

    interpret: bool = False
    num_sms: int | None = None
    name = "hopper"

    def unsupported(self, problem: Problem) -> str | None:
        """Why these kernels cannot run `problem` here, or None."""
        if not self.interpret and (reason := _device_reason()):
            return reason
        if problem.dtype not in DTYPES:
            return f"takes bfloat16 and float16, not {problem.dtype}: cast q, k and v"
        widest = max(problem.head_dim, problem.v_head_dim)
        if widest > NATIVE_HEAD_DIMS[-1]:
            return f"takes head dims up to {NATIVE_HEAD_DIMS[-1]}, not {widest}"
        if problem.batch > MAX_GRID:
            return f"takes batches up to {MAX_GRID}, not {problem.batch}: split the batch"
        features = [name for name in sorted(problem.features) if name not in FEATURES]
        if features or problem.spec.mask.left is not None:
            return f"has no {', '.join(features) or 'window'} yet"
        return None

    def blocks(self, problem: Problem, override: dict[str, Any] | None) -> HopperBlocks:
        """Tile sizes of the kernels that would run; see blocks.py."""
        return choose_blocks(problem, override)

    def forward(self, spec: AttentionSpec, blocks: HopperBlocks, operands: Operands):
        """(o [B, T, N, Hv], lse_log2 f32[B, N, T])."""
        problem = describe(operands, spec)
        native, (q, k, v) = _pad(problem, operands.q, operands.k, operands.v)
        o, lse = forward(
            native,
            blocks.forward,
            (q, k, v, _offsets(operands)),
            self.num_sms or _num_sms(),
            self.interpret,
        )
        return Outputs(o[:, : problem.q_len, :, : problem.v_head_dim], lse[:, :, : problem.q_len])

    def backward(
        self,
        spec: AttentionSpec,
        blocks: HopperBlocks,
        operands: Operands,
        cotangents: Cotangents,
        wanted: frozenset[str],
    ) -> Grads:
        """Gradients; dK and dV summed over each group of query heads inside the kernels."""
        problem = describe(operands, spec)
        lse_log2, do, delta = cotangents
        native, (q, k, v, do) = _pad(problem, operands.q, operands.k, operands.v, do)
        rows = round_up(problem.q_len, ROW_MULTIPLE)
        arrays = BackwardArrays(
            *(q, k, v, do),
            lse_log2=pad_axis(lse_log2, 2, rows, EMPTY_ROW),
            delta=pad_axis(delta, 2, rows),
            q_offset=_offsets(operands),
        )
        if isinstance(blocks.backward, FusedBlocks):
            grads = Grads(*backward_fused(native, blocks.backward, arrays, self.interpret))
        else:
            dk, dv = dkv(native, blocks.backward.dkv, arrays, self.interpret)
            grads = Grads(dq(native, blocks.backward.dq, arrays, self.interpret), dk, dv)
        return Grads(
            grads.q[:, : problem.q_len, :, : problem.head_dim],
            grads.k[:, : problem.kv_len, :, : problem.head_dim],
            grads.v[:, : problem.kv_len, :, : problem.v_head_dim],
        )


def _device_reason() -> str | None:
    if jax.default_backend() != "gpu":
        return (
            "needs an NVIDIA GPU of compute capability 9.0; "
            f"the default backend is {jax.default_backend()}"
        )
    capability = getattr(jax.devices()[0], "compute_capability", "unknown")
    if capability != "9.0":
        return f"needs compute capability 9.0 (H100, H200); this GPU has {capability}"
    return None


def _num_sms() -> int:
    return getattr(jax.devices()[0], "core_count", None) or H200_SMS


def _pad(problem: Problem, *arrays):
    """Zero-padded copies with native head dim and lengths in multiples of 8, and their Problem.

    An array that needs no padding is passed on as it is. Zero columns change no score, and the
    columns that they add to outputs are dropped.
    """
    head_dim = native_head_dim(problem)
    padded = [
        pad_axis(pad_axis(x, 3, head_dim), 1, round_up(x.shape[1], LENGTH_MULTIPLE)) for x in arrays
    ]
    return dataclasses.replace(problem, head_dim=head_dim, v_head_dim=head_dim), padded


def _offsets(operands: Operands):
    if operands.q_offset is not None:
        return operands.q_offset
    return jnp.zeros(operands.q.shape[0], jnp.int32)
