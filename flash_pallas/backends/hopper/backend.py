"""The Hopper kernels as a backend: which problems they take, and how arrays are padded for them."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...core.decode import DecodeOperands, DecodeProblem, DecodeSpec
from ...core.decode import describe as describe_decode
from ...core.problem import AttentionSpec, Cotangents, Grads, Operands, Outputs, Problem, describe
from ..gpu.refusals import refusal
from .backward.launch import backward
from .candidates import candidates
from .common.wgmma import Matmuls
from .decode import tiles
from .decode.kernel import decode
from .decode.packed_forward import forward_packed
from .forward.kernel import forward
from .forward.tiles import NATIVE_HEAD_DIMS, native_problem
from .tiling import HopperBlocks, choose_blocks, trades_registers

DTYPES = (np.dtype(jnp.bfloat16), np.dtype(jnp.float16), np.dtype(jnp.float32))
WIDEST_FLOAT32 = 128  # head dim: its two parts fill shared memory as 256 does in 16 bits
H200_SMS = 132  # assumed where there is no GPU to ask: H100 SXM and H200


@dataclasses.dataclass(frozen=True)
class HopperBackend:
    """Backend of the kernels for H100 and H200.

    Attributes:
        interpret: run on CPU under the Mosaic GPU interpreter, with race detection (for tests).
        num_sms: number of SMs to spread persistent kernels over; None asks the device.
        trades_registers: whether the compiler honours setmaxnreg; None asks the installed jaxlib.
        capability: compute capability of the GPU to answer for; None asks the device.
    """

    interpret: bool = False
    num_sms: int | None = None
    trades_registers: bool | None = None
    capability: str | None = None
    name = "hopper"

    @property
    def producer(self) -> bool:
        """Says whether the kernels have a producer warpgroup, which only loads."""
        return trades_registers() if self.trades_registers is None else self.trades_registers

    @property
    def multiprocessors(self) -> int:
        """Number of SMs that a kernel has."""
        return self.num_sms or _num_sms()

    @property
    def partitionable(self) -> bool:
        """Says whether calls may be partitioned over devices.

        Not under the interpreter, whose callbacks the partitioner would drop.
        """
        return not self.interpret

    def unsupported(self, problem: Problem) -> str | None:
        """Returns why these kernels cannot run `problem` here, or None."""
        if not self.interpret and (reason := _device_reason(self.capability)):
            return reason
        if problem.dtype not in DTYPES:
            return f"takes bfloat16, float16 and float32, not {problem.dtype}: cast q, k and v"
        widest = max(problem.head_dim, problem.v_head_dim)
        if problem.spec.precision == "highest":
            return "multiplies float32 as three products of bfloat16 at most: pass precision='high'"
        if problem.dtype == np.float32 and widest > WIDEST_FLOAT32:
            return (
                f"takes float32 with head dims up to {WIDEST_FLOAT32}, not {widest}: cast q, k and "
                "v to bfloat16"
            )
        if widest > NATIVE_HEAD_DIMS[-1]:
            return f"takes head dims up to {NATIVE_HEAD_DIMS[-1]}, not {widest}"
        return refusal(problem)

    def blocks(self, problem: Problem, override: dict[str, Any] | None) -> HopperBlocks:
        """Returns the tile sizes of the kernels that would run; see tiling.py."""
        return choose_blocks(problem, override, self.producer, self.multiprocessors)

    def candidates(self, problem: Problem) -> dict[str, list[dict[str, Any]]]:
        """Returns the tile sizes worth timing, by kernel; see candidates.py."""
        return candidates(problem, self.producer, self.multiprocessors)

    def forward(self, spec: AttentionSpec, blocks: HopperBlocks, operands: Operands) -> Outputs:
        """Computes attention; see core.problem.Outputs."""
        problem = describe(operands, spec)
        if blocks.forward.packed:
            return forward_packed(problem, operands, self.multiprocessors, self.interpret)
        native = native_problem(problem)
        products = Matmuls(problem.dtype, self.interpret)
        q, k = (products.operand(x, native.head_dim) for x in (operands.q, operands.k))
        v = products.operand(operands.v, native.v_head_dim, blocks.forward.block_kv)
        out = forward(
            native,
            blocks.forward,
            operands._replace(q=q, k=k, v=v),
            self.multiprocessors,
            self.interpret,
        )
        o = products.joined(out.o)[:, : problem.q_len, :, : problem.v_head_dim]
        rows = out._replace(o=None)
        return jax.tree.map(lambda x: x[:, :, : problem.q_len], rows)._replace(o=o)

    def backward(
        self,
        spec: AttentionSpec,
        blocks: HopperBlocks,
        operands: Operands,
        cotangents: Cotangents,
        wanted: frozenset[str],
    ) -> Grads:
        """Computes gradients; the kernels sum dK and dV over each group of query heads."""
        problem = describe(operands, spec)
        return backward(problem, blocks.backward, operands, cotangents, wanted, self.interpret)

    def unsupported_decode(self, problem: DecodeProblem) -> str | None:
        """Returns why the decode kernel cannot run `problem` here, or None."""
        if not self.interpret and (reason := _device_reason(self.capability)):
            return reason
        return tiles.unsupported(problem)

    def decode_blocks(self, problem: DecodeProblem) -> tiles.DecodeBlocks:
        """Returns the tile sizes and the number of splits; see decode/tiles.py."""
        return tiles.choose_decode(problem, self.multiprocessors)

    def decode(
        self, spec: DecodeSpec, blocks: tiles.DecodeBlocks, operands: DecodeOperands
    ) -> Outputs:
        """Computes attention of a few queries to a KV cache; see decode/kernel.py."""
        return decode(describe_decode(operands, spec), blocks, operands, self.interpret)


def _device_reason(capability: str | None) -> str | None:
    if capability is None:
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
