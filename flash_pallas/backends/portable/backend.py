"""The portable kernels as a backend: what they support, and how arrays are padded for them."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax

from ...core import padding
from ...core.decode import DecodeOperands, DecodeProblem, DecodeSpec
from ...core.decode import describe as describe_decode
from ...core.integers import round_up
from ...core.padding import pad_axis
from ...core.problem import (
    AttentionSpec,
    Cotangents,
    Operands,
    Outputs,
    Problem,
    Tangents,
    describe,
)
from ...core.ragged import RaggedBlocks, RaggedOperands, RaggedProblem, RaggedSpec
from ...core.ragged import attend as attend_ragged
from ...devices import GENERATIONS, capability_here, no_gpu
from .. import base
from ..gpu.launch import refusal
from ..xla import ragged as xla_ragged
from . import tiling
from .backward.base import BackwardArrays
from .backward.dbias.kernel import scores
from .backward.fused.kernel import fused
from .backward.split.dkv import dkv
from .backward.split.dq import dq
from .backward.tiles import FusedSizes
from .common.smem_tiles import DTYPES, HEAD_DIM_MULTIPLE
from .common.tiles import WIDEST_SHARED, TileSizes, memory_of
from .decode import tiles as decode_tiles
from .decode.kernel import decode
from .forward.kernel import forward
from .tangent.kernel import tangents as push
from .tiling import PortableBlocks, choose_blocks

NUM_SMS = 108  # of an A100, where the device does not say


@dataclasses.dataclass(frozen=True)
class PortableBackend:
    """Backend of the kernels for compute capability 8.0 and above.

    Attributes:
        interpret: run on CPU under the Mosaic GPU interpreter (for tests).
        capability: compute capability to answer and choose tile sizes for; None asks the device.
        num_sms: number of SMs to spread the keys of a cache over; None asks the device.
    """

    interpret: bool = False
    capability: str | None = None
    num_sms: int | None = None
    name = "portable"
    note = None
    jvp_of_vjp = base.Refused("has none")

    @property
    def partitionable(self) -> bool:
        """False under the interpreter, whose callbacks the partitioner would drop."""
        return not self.interpret

    @property
    def capability_there(self) -> str:
        """Compute capability that tile sizes are chosen for."""
        return self.capability or capability_here()

    @property
    def device_refusal(self) -> str | None:
        """The reason why the GPU that is there runs none of the kernels, or None."""
        return None if self.interpret else _device_reason(self.capability)

    @property
    def attention(self) -> PortableAttention:
        """The forward kernel."""
        return PortableAttention(self)

    @property
    def vjp(self) -> PortableVjp:
        """The backward kernels."""
        return PortableVjp(self)

    @property
    def jvp(self) -> PortableJvp:
        """The tangent kernel."""
        return PortableJvp(self)

    @property
    def decode(self) -> PortableDecode:
        """The decode kernel."""
        return PortableDecode(self)

    @property
    def ragged(self) -> PortableRagged:
        """The decode kernel for steps, jnp for chunks of prompts."""
        return PortableRagged(self)


class _Operation:
    def __init__(self, backend: PortableBackend):
        self.backend = backend


class PortableAttention(_Operation, base.Attention):
    """The forward kernel."""

    def refusal(self, problem: Problem) -> str | None:
        """Returns why these kernels cannot run `problem` here, or None."""
        if reason := self.backend.device_refusal:
            return reason
        if problem.dtype not in DTYPES:
            return f"takes bfloat16 and float16, not {problem.dtype}: cast q, k and v"
        widest = max(problem.head_dim, problem.v_head_dim)
        if widest > WIDEST_SHARED:
            return f"takes head dims up to {WIDEST_SHARED}, not {widest}"
        return refusal(problem)

    def plan(self, problem: Problem, override: dict[str, Any] | None = None) -> PortableBlocks:
        """Returns the tile sizes of the kernels that would run; see tiling.py."""
        return choose_blocks(problem, override, self.backend.capability_there)

    def run(self, spec: AttentionSpec, blocks: PortableBlocks, operands: Operands) -> Outputs:
        """Computes attention; see core.problem.Outputs."""
        problem, interpret = describe(operands, spec), self.backend.interpret
        out = forward(describe_padded(problem), blocks.forward, _padded(operands), interpret)
        return out._replace(o=out.o[..., : problem.v_head_dim])


class PortableVjp(_Operation, base.Vjp):
    """The backward kernels."""

    def run(
        self,
        spec: AttentionSpec,
        blocks: PortableBlocks,
        operands: Operands,
        cotangents: Cotangents,
        wanted: frozenset[str],
    ) -> Operands:
        """Computes the gradients; `blocks` says which kernels run."""
        problem, interpret = describe(operands, spec), self.backend.interpret
        do = padding.cleared_queries(operands, cotangents.do)
        cotangents = cotangents._replace(do=pad_axis(do, 3, _head_dim(problem.v_head_dim)))
        padded, operands = describe_padded(problem), _padded(operands)
        arrays = BackwardArrays.of(operands, cotangents)
        tile = blocks.backward
        if isinstance(tile, FusedSizes):
            of_q, dk, dv = fused(padded, tile, operands, arrays, interpret)
        else:
            dk, dv = dkv(padded, tile.dkv, operands, arrays, interpret)
            of_q = dq(padded, tile.dq, operands, arrays, interpret)
        return Operands(
            of_q[..., : problem.head_dim],
            dk[..., : problem.head_dim],
            dv[..., : problem.v_head_dim],
            **scores(padded, blocks.scores, operands, arrays, wanted, interpret),
        )


class PortableJvp(_Operation, base.Jvp):
    """The tangent kernel, which runs after the forward: tangent/kernel.py."""

    def refusal(
        self, problem: Problem, blocks: PortableBlocks, moves: frozenset[str], *, primal: bool
    ) -> str | None:
        """Returns why the tangent kernel does not run a problem, or None."""
        if primal:
            return "computes none together with the forward"
        tile = self._tile(describe_padded(problem))
        return None if tile else "has no tiles for them that fit into shared memory"

    def run(
        self, spec: AttentionSpec, operands: Operands, tangents: Operands, outputs: Outputs | None
    ) -> Tangents:
        """Computes the tangents of O and of the log-sum-exp."""
        assert outputs is not None
        problem = describe(operands, spec)
        padded, padded_tangents = describe_padded(problem), _padded(operands, tangents)
        operands, o = _padded(operands), pad_axis(outputs.o, 3, padded.v_head_dim)
        tile, outputs = self._tile(padded), outputs._replace(o=o)
        assert tile is not None
        interpret = self.backend.interpret
        moved = push(padded, tile, operands, padded_tangents, outputs, interpret)
        return moved._replace(do=moved.do[..., : problem.v_head_dim])

    def _tile(self, problem: Problem) -> TileSizes | None:
        return tiling.choose_tangent(problem, self.backend.capability_there)


class PortableDecode(_Operation, base.Decode):
    """The decode kernel."""

    def refusal(self, problem: DecodeProblem) -> str | None:
        """Returns why the decode kernel cannot run `problem` here, or None."""
        if reason := self.backend.device_refusal:
            return reason
        return decode_tiles.unsupported(problem, memory_of(self.backend.capability_there))

    def plan(self, problem: DecodeProblem) -> decode_tiles.PortableDecodeBlocks:
        """Chooses tile sizes and the number of splits; see decode/tiles.py."""
        num_sms = self.backend.num_sms or _num_sms()
        return decode_tiles.choose(problem, num_sms, memory_of(self.backend.capability_there))

    def run(
        self, spec: DecodeSpec, blocks: decode_tiles.PortableDecodeBlocks, operands: DecodeOperands
    ) -> Outputs:
        """Computes attention of a few queries to a KV cache; see decode/kernel.py."""
        if spec.shares_prefix:
            return self.run_shared(spec, operands)
        return decode(describe_decode(operands, spec), blocks, operands, self.backend.interpret)


class PortableRagged(_Operation, base.Ragged):
    """Steps by the decode kernel, chunks of prompts in jnp."""

    def refusal(self, problem: RaggedProblem) -> str | None:
        """Returns why the decode kernel cannot run the steps of `problem` here, or None."""
        return self.backend.decode.refusal(problem.steps)

    def plan(self, problem: RaggedProblem) -> RaggedBlocks:
        """Returns the blocks of the decode kernel for steps, and those of jnp for chunks."""
        chunks = xla_ragged.choose_chunks(problem)
        return RaggedBlocks(
            steps=self.backend.decode.plan(problem.steps),
            chunks=chunks,
            chunks_on=self.backend.name if chunks is None else "xla",
        )

    def run(self, spec: RaggedSpec, blocks: RaggedBlocks, operands: RaggedOperands) -> Outputs:
        """Computes steps with the decode kernel, and chunks of prompts in jnp."""
        steps = partial(self.backend.decode.run, spec.decode, blocks.steps)
        return attend_ragged(steps, partial(xla_ragged.chunks, blocks.chunks), spec, operands)


def _head_dim(size: int) -> int:
    return round_up(size, HEAD_DIM_MULTIPLE)


def describe_padded(problem: Problem) -> Problem:
    """Returns `problem` with head dims that can be copied in units of 16 bytes (multiples of 8)."""
    return dataclasses.replace(
        problem, head_dim=_head_dim(problem.head_dim), v_head_dim=_head_dim(problem.v_head_dim)
    )


def _padded(operands: Operands, arrays: Operands | None = None) -> Operands:
    """Pads head dims as in `describe_padded` and zeros what segment ids mark as padding.

    Kernels read nothing beyond the lengths.

    Args:
        operands: operands of the call.
        arrays: what is padded: the operands, or their tangents; None: the operands.
    """
    arrays = operands if arrays is None else arrays
    if operands.q_segments is not None:
        arrays = padding.cleared(operands, arrays)
    width, v_width = (_head_dim(x.shape[3]) for x in (arrays.q, arrays.v))
    return arrays._replace(
        q=pad_axis(arrays.q, 3, width),
        k=pad_axis(arrays.k, 3, width),
        v=pad_axis(arrays.v, 3, v_width),
    )


def _num_sms() -> int:
    return getattr(jax.devices()[0], "core_count", None) or NUM_SMS


def _device_reason(capability: str | None) -> str | None:
    if capability is None and (reason := no_gpu("8.0 or above")):
        return reason
    if (capability := capability or capability_here()) not in GENERATIONS:
        return f"needs one of compute capabilities {', '.join(GENERATIONS)}, not {capability}"
    return None
