"""The Hopper kernels as a backend: the problems that they take, padding, and tile sizes."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...core.decode import DecodeOperands, DecodeProblem, DecodeSpec
from ...core.decode import describe as describe_decode
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
from ...devices import capability_here, no_gpu, takes_first
from .. import base
from ..gpu import jax_compat
from ..gpu.launch import MOST_BARRIERS, refusal
from ..xla import ragged as xla_ragged
from .backward.fused.launches import MOST_PARTS
from .backward.fused.tiles import FusedBlocks, hides_keys, may_sum_bias
from .backward.fused.tiles import without_producer as fused_without_producer
from .backward.launch import (
    SplitBlocks,
    backward,
    choose_backward,
    kernel_of,
    native_backward_problem,
)
from .backward.paired.tiles import PairedBlocks
from .backward.split.tiles import DkvBlocks, DqBlocks
from .backward.tangent.launch import launches, push_backward
from .common.pipeline import SMEM_LIMIT, Matmuls
from .decode.kernel import decode
from .decode.packed_forward import described, forward_packed, packs
from .decode.shared import decode_shared
from .decode.shared import takes as takes_shared
from .decode.tiles import EVEN_COLUMNS, DecodeBlocks, choose_decode, takes_upright
from .decode.tiles import trades_registers as trades
from .decode.tiles import unsupported as unsupported_decode
from .forward.kernel import forward
from .forward.tiles import (
    MOST_HALF,
    TEAMS,
    ForwardBlocks,
    choose_forward,
    may_pack,
    native_problem,
    without_producer,
)
from .ragged.kernel import attend_packed, joined, ragged_chunks
from .ragged.tiles import choose_chunk_blocks, unsupported_chunks
from .tangent import kernel as tangent_kernel
from .tangent.tiles import choose_tangent
from .wide import latent
from .wide import launch as wide
from .wide.latent import LatentBlocks
from .wide.launch import WideGradients
from .wide.tiles import NARROW, WideBlocks

# --- Problems and padding -------------------------------------------------------------------------

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
    note = None

    @property
    def producer(self) -> bool:
        """True if the kernels have a producer warpgroup, which only loads."""
        asked = self.trades_registers
        return jax_compat.trades_registers() if asked is None else asked

    @property
    def sms(self) -> int:
        """Number of SMs that a kernel has."""
        return self.num_sms or _num_sms()

    @property
    def partitionable(self) -> bool:
        """Returns whether calls may be partitioned over devices.

        Not under the interpreter, whose callbacks the partitioner would drop.
        """
        return not self.interpret

    @property
    def device_refusal(self) -> str | None:
        """The reason why the GPU that is there runs none of the kernels, or None."""
        return None if self.interpret else _device_reason(self.capability)

    @property
    def attention(self) -> HopperAttention:
        """The forward kernels."""
        return HopperAttention(self)

    @property
    def vjp(self) -> HopperVjp:
        """The backward kernels."""
        return HopperVjp(self)

    @property
    def jvp(self) -> HopperJvp:
        """The tangent kernels."""
        return HopperJvp(self)

    @property
    def jvp_of_vjp(self) -> HopperJvpOfVjp:
        """The tangent kernel of the backward."""
        return HopperJvpOfVjp(self)

    @property
    def decode(self) -> HopperDecode:
        """The decode kernels."""
        return HopperDecode(self)

    @property
    def ragged(self) -> HopperRagged:
        """The ragged kernel for chunks of prompts, and the decode kernel for steps."""
        return HopperRagged(self)


class _Operation:
    def __init__(self, backend: HopperBackend):
        self.backend = backend


class HopperAttention(_Operation, base.Attention):
    """The forward kernels: dense, of wide heads, and the decode kernel where queries are few."""

    def refusal(self, problem: Problem) -> str | None:
        """Returns why these kernels cannot run `problem` here, or None."""
        if reason := self.backend.device_refusal:
            return reason
        if problem.dtype not in DTYPES:
            return f"takes bfloat16, float16 and float32, not {problem.dtype}: cast q, k and v"
        widest = max(problem.head_dim, problem.v_head_dim)
        if problem.spec.precision == "highest":
            return (
                "does not support precision='highest': float32 matmuls are three of bfloat16, with "
                "a relative error up to 2^-15; pass precision='high'"
            )
        if problem.dtype == np.float32 and widest > WIDEST_FLOAT32:
            return (
                f"takes float32 with head dims up to {WIDEST_FLOAT32}, not {widest}: cast q, k and "
                "v to bfloat16"
            )
        if _is_wide(problem) and (reason := wide.unsupported(problem)):
            return reason
        return refusal(problem)

    def plan(self, problem: Problem, override: dict[str, Any] | None = None) -> HopperBlocks:
        """Returns the tile sizes of the kernels that would run; see `choose_blocks`."""
        return choose_blocks(problem, override, self.backend.producer, self.backend.sms)

    def candidates(self, problem: Problem) -> dict[str, list[dict[str, Any]]]:
        """Returns the tile sizes worth timing, by kernel; see `candidates`."""
        return candidates(problem, self.backend.producer, self.backend.sms)

    def run(self, spec: AttentionSpec, blocks: HopperBlocks, operands: Operands) -> Outputs:
        """Computes attention; see core.problem.Outputs."""
        problem, interpret = describe(operands, spec), self.backend.interpret
        if isinstance(blocks.forward, WideBlocks):
            return wide.forward(problem, blocks.forward, operands, interpret)
        if blocks.forward.packed:
            return forward_packed(problem, operands, self.backend.sms, interpret)
        native = native_problem(problem)
        matmuls = Matmuls(problem.dtype, interpret)
        q = matmuls.operand(operands.q, native.head_dim)
        k = matmuls.operand(operands.k, native.head_dim)
        v = matmuls.operand(operands.v, native.v_head_dim, blocks.forward.block_kv)
        native_operands = operands._replace(q=q, k=k, v=v)
        out = forward(native, blocks.forward, native_operands, self.backend.sms, interpret)
        o = matmuls.joined(out.o)[:, : problem.q_len, :, : problem.v_head_dim]
        rows = out._replace(o=None)
        return jax.tree.map(lambda x: x[:, :, : problem.q_len], rows)._replace(o=o)


class HopperVjp(_Operation, base.Vjp):
    """The backward kernels; they sum dK and dV over each group of query heads."""

    def run(
        self,
        spec: AttentionSpec,
        blocks: HopperBlocks,
        operands: Operands,
        cotangents: Cotangents,
        wanted: frozenset[str],
    ) -> Operands:
        """Computes gradients; `blocks` says by which kernels."""
        problem, interpret = describe(operands, spec), self.backend.interpret
        if isinstance(blocks.backward, WideGradients):
            tiles, producer = blocks.backward, self.backend.producer
            return wide.backward(problem, tiles, operands, cotangents, wanted, producer, interpret)
        return backward(problem, blocks.backward, operands, cotangents, wanted, interpret)


class HopperJvp(_Operation, base.Jvp):
    """The tangent kernels of the forward: tangent/kernel.py."""

    def refusal(
        self, problem: Problem, blocks: HopperBlocks, moves: frozenset[str], *, primal: bool
    ) -> str | None:
        """Returns why the tangent kernels do not run a problem, or None."""
        if isinstance(blocks.forward, WideBlocks):
            return "has none for head dims above 256"
        if primal and blocks.forward.packed:
            return "computes this forward by the decode kernels, which have none"
        if primal and problem.spec.max_logit:
            return "computes none together with the largest logit"
        producer = self.backend.producer
        tiles = choose_tangent(problem, moves, primal=primal, producer=producer)
        return None if tiles else "has no tiles for them that fit into shared memory"

    def run(
        self, spec: AttentionSpec, operands: Operands, tangents: Operands, outputs: Outputs | None
    ) -> Tangents:
        """Computes the tangents of O and of the log-sum-exp."""
        problem, producer = describe(operands, spec), self.backend.producer
        interpret = self.backend.interpret
        return tangent_kernel.push(problem, operands, tangents, outputs, producer, interpret)


class HopperJvpOfVjp(_Operation, base.JvpOfVjp):
    """The tangent kernel of the backward: backward/tangent/kernel.py."""

    def refusal(
        self, problem: Problem, moves: frozenset[str], wanted: frozenset[str]
    ) -> str | None:
        """Returns why the tangent kernel of the backward does not run a problem, or None."""
        if _is_wide(problem):
            return "has none for head dims above 256"
        if others := sorted((moves | wanted) - {"q", "k", "v"}):
            return f"has those of q, k and v alone, not of {', '.join(others)}"
        fits = launches(problem) is not None
        return None if fits else "has no tiles for them that fit into shared memory"

    def run(
        self,
        spec: AttentionSpec,
        operands: Operands,
        cotangents: Cotangents,
        tangents: Operands,
        cotangents_tangents: Cotangents,
    ) -> Operands:
        """Computes the tangents of the gradients of q, k and v."""
        problem, moved = describe(operands, spec), cotangents_tangents
        return push_backward(problem, operands, cotangents, tangents, moved, self.backend.interpret)


class HopperDecode(_Operation, base.Decode):
    """The decode kernels: decode/kernel.py, and wide/latent.py for latent attention."""

    def refusal(self, problem: DecodeProblem) -> str | None:
        """Returns why the decode kernels cannot run `problem` here, or None."""
        if reason := self.backend.device_refusal or unsupported_decode(problem):
            return reason
        trading = trades(problem) and not takes_upright(problem) and not latent.takes(problem)
        if trading and not (self.backend.interpret or self.backend.producer):
            return (
                f"decodes head dims of v up to {2 * EVEN_COLUMNS} with jaxlib 0.12, whose compiler "
                f"lets no warpgroups trade registers, not {problem.v_head_dim}, unless queries are "
                "few: install jaxlib 0.11"
            )
        return None

    def plan(self, problem: DecodeProblem) -> DecodeBlocks | LatentBlocks:
        """Returns the options and the number of splits; see decode/tiles.py and wide/latent.py."""
        if latent.takes(problem):
            return latent.choose(problem, self.backend.sms)
        return choose_decode(problem, self.backend.sms)

    def run(
        self, spec: DecodeSpec, blocks: DecodeBlocks | LatentBlocks, operands: DecodeOperands
    ) -> Outputs:
        """Computes attention of a few queries to a KV cache; see decode/kernel.py."""
        problem, interpret = describe_decode(operands, spec), self.backend.interpret
        if spec.shares_prefix:
            if takes_shared(problem):
                results = decode_shared(spec, operands, self.backend.sms, interpret)
                if results is not None:
                    return results[0]
            return self.run_shared(spec, operands)
        if isinstance(blocks, LatentBlocks):
            return latent.decode(problem, blocks, operands, interpret)
        return decode(problem, blocks, operands, interpret)


class HopperRagged(_Operation, base.Ragged):
    """Steps by the decode kernel, chunks of prompts by the ragged kernel, or in jnp."""

    def refusal(self, problem: RaggedProblem) -> str | None:
        """Returns why the decode kernel cannot run the steps of `problem` here, or None."""
        return self.backend.decode.refusal(problem.steps)

    def plan(self, problem: RaggedProblem) -> RaggedBlocks:
        """Returns the blocks of the decode kernel for steps, and those for chunks of prompts.

        Those that the ragged kernel does not take run in jnp.
        """
        steps, chunks = self.backend.decode.plan(problem.steps), None
        if problem.has_chunks:
            if unsupported_chunks(problem):
                return dataclasses.replace(xla_ragged.choose_blocks(problem), steps=steps)
            chunks = choose_chunk_blocks(problem, self.backend.sms, self.backend.producer)
        return RaggedBlocks(steps, chunks, self.backend.name)

    def run(self, spec: RaggedSpec, blocks: RaggedBlocks, operands: RaggedOperands) -> Outputs:
        """Computes steps with the decode kernel, chunks of prompts with the ragged one."""
        options = {"num_sms": self.backend.sms, "interpret": self.backend.interpret}
        steps = functools.partial(self.backend.decode.run, spec.decode, blocks.steps)
        if isinstance(blocks.chunks, ForwardBlocks):
            results = None
            if spec.step_tokens == 1:
                results = attend_packed(blocks, spec, operands, **options)
            if results is not None:
                return results
            chunks = functools.partial(ragged_chunks, blocks.chunks, **options)
            return attend_ragged(steps, chunks, spec, operands, joined)
        chunks = functools.partial(xla_ragged.chunks, blocks.chunks)
        return attend_ragged(steps, chunks, spec, operands)


def _device_reason(capability: str | None) -> str | None:
    if capability is None:
        if reason := no_gpu("9.0"):
            return reason
        capability = capability_here()
    if takes_first(capability) != HopperBackend.name:
        return f"needs compute capability 9.0 (H100, H200); this GPU has {capability}"
    return None


def _num_sms() -> int:
    return getattr(jax.devices()[0], "core_count", None) or H200_SMS


# --- Tile sizes: what can be chosen, and what is chosen -------------------------------------------


@dataclasses.dataclass(frozen=True)
class HopperBlocks:
    """Tile sizes of every kernel that a call and its gradient run."""

    forward: ForwardBlocks | WideBlocks
    backward: FusedBlocks | PairedBlocks | SplitBlocks | WideGradients


_ALONE = {"fused", "paired"}  # kernels that compute all gradients


def choose_blocks(
    problem: Problem, override: dict[str, Any] | None, producer: bool, num_sms: int
) -> HopperBlocks:
    """Chooses the tuned tile sizes, with fields replaced by `override`.

    Args:
        problem: the shapes.
        producer: whether the chosen blocks have a producer warpgroup, which takes
            `trades_registers`.
        num_sms: number of SMs that the tiles are to keep busy.
        override: for each kernel that runs (`"forward"`, `"fused"`, `"paired"`, `"dkv"`, `"dq"`), a
            dict of the fields to replace, such as `{"forward": {"block_kv": 64}}`.

    Raises:
        ValueError: an unknown kernel or field, or tiles that do not fit.
    """
    if _is_wide(problem):
        return _wide_blocks(problem, override)
    packed = may_pack(problem) and packs(problem, num_sms)
    forward = dataclasses.replace(choose_forward(problem, num_sms), packed=packed)
    backward = choose_backward(problem, num_sms, producer)
    if not producer:
        forward = without_producer(forward, problem)
        backward = {name: _without_producer(b, problem) for name, b in backward.items()}
    chosen: dict[str, Any] = {"forward": forward, **backward}
    for kernel, fields in (override or {}).items():
        if kernel not in chosen:
            raise ValueError(
                f"blocks has {kernel!r}: on the hopper backend this call runs the kernels "
                f"{', '.join(map(repr, chosen))}; pass blocks={{'forward': {{'block_kv': 64}}}}"
            )
        if kernel == "forward":
            size = native_problem(problem)
        else:
            size = native_backward_problem(problem, kernel if kernel in _ALONE else "split")
        chosen[kernel] = _replaced(kernel, chosen[kernel], fields, size, problem)
    forward = chosen.pop("forward")
    if chosen.keys() <= _ALONE:
        (alone,) = chosen.values()
        return HopperBlocks(forward, alone)
    return HopperBlocks(forward, SplitBlocks(**chosen))


def _is_wide(problem: Problem) -> bool:
    """Returns whether a problem's head dims are above those of the other kernels."""
    return max(problem.head_dim, problem.v_head_dim) > NARROW


def _wide_blocks(problem: Problem, override: dict[str, Any] | None) -> HopperBlocks:
    chosen: dict[str, Any] = wide.choose_wide(problem)
    for kernel, fields in (override or {}).items():
        if kernel not in chosen:
            raise ValueError(
                f"blocks has {kernel!r}: on the hopper backend this call runs the kernels "
                f"{', '.join(map(repr, chosen))}; pass blocks={{'forward': {{'chunks': 6}}}}"
            )
        chosen[kernel] = _with_fields(kernel, chosen[kernel], fields)
        if reason := wide.misfit(problem, kernel, chosen[kernel]):
            raise ValueError(f"blocks[{kernel!r}] is {fields!r}: {reason}")
    forward = chosen.pop("forward")
    return HopperBlocks(forward, WideGradients(**chosen))


def _without_producer(blocks, problem: Problem):
    if isinstance(blocks, FusedBlocks):
        return fused_without_producer(blocks, problem)
    return dataclasses.replace(blocks, producer=False)


# The most that a field may be: registers for as many warpgroups, exponents of two whose squares
# float32 holds (of a lazy rescale float16 too), and the barriers of one array.
_MOST = {"warpgroups": 3, "teams": TEAMS, "polynomials": 1.0}
_MOST |= {"split_q": MOST_PARTS, "speculates": 60.0, "lazy_rescale": MOST_HALF}
_MOST |= {
    name: MOST_BARRIERS
    for blocks in (ForwardBlocks, FusedBlocks, PairedBlocks, DkvBlocks, DqBlocks)
    for name in vars(blocks())
    if name.endswith("stages")
}


def _with_fields(kernel: str, blocks, fields):
    names = {field.name for field in dataclasses.fields(blocks)}
    if not isinstance(fields, dict) or not names.issuperset(fields):
        raise ValueError(f"blocks[{kernel!r}] is {fields!r}: a dict with keys of {sorted(names)}")
    for name, value in fields.items():
        if reason := _misfit(name, value, type(getattr(blocks, name)), kernel):
            raise ValueError(f"blocks[{kernel!r}][{name!r}] is {value!r}: {reason}")
    try:
        return dataclasses.replace(blocks, **fields)
    except ValueError as error:
        raise ValueError(f"blocks[{kernel!r}] is {fields!r}: {error}") from None


def _replaced(kernel: str, blocks, fields, size, problem: Problem):
    replaced = _with_fields(kernel, blocks, fields)
    if isinstance(replaced, ForwardBlocks) and replaced.packed and described(problem) is None:
        raise ValueError(
            "blocks['forward']['packed'] is True: the kernels of flash_decode do not take this call"
        )
    rows = replaced.tile_rows if isinstance(replaced, ForwardBlocks) else replaced.block_q
    takes = size.takes_tiles(rows, replaced.block_kv)
    if not (replaced.suits(size) if isinstance(replaced, DkvBlocks) else takes):
        raise ValueError(
            f"blocks[{kernel!r}] is {fields!r}: tiles of {rows} queries and {replaced.block_kv} "
            f"keys do not divide the blocks of block_mask, {size.spec.block_shape}"
        )
    if isinstance(replaced, FusedBlocks) and (reason := _refused(replaced, size)):
        raise ValueError(f"blocks[{kernel!r}] is {fields!r}: {reason}")
    if replaced.smem_bytes(size) > SMEM_LIMIT:
        raise ValueError(
            f"blocks[{kernel!r}] needs {replaced.smem_bytes(size)} bytes of shared memory and "
            f"there are {SMEM_LIMIT}: use fewer stages or smaller blocks"
        )
    return replaced


def _misfit(name: str, value, kind: type, kernel: str) -> str | None:
    """Returns why a field of this type cannot have this value, whatever the others are, or None."""
    unit = {"fused": 64, "forward": 16}.get(kernel, 32)
    if name.startswith("block_"):
        tile = type(value) is int and 0 < value <= 256 and value % unit == 0
        return None if tile else f"a multiple of {unit} up to 256"
    if type(value) is not kind:
        return "True or False" if kind is bool else f"of type {kind.__name__}"
    least, most = (1 if kind is int else 0.0), _MOST.get(name, math.inf)
    if kind is not bool and not least <= value <= most:  # a NaN neither
        return f"from {least} to {most}" if most < math.inf else f"at least {least}"
    return None


def _refused(blocks: FusedBlocks, size: Problem) -> str | None:
    """Returns why the fused backward cannot run with these blocks, or None."""
    if not blocks.runs(size.head_dim):
        return "'block_q' must be 128 for head dims up to 16"
    if blocks.ping_pong and not blocks.may_ping_pong(size):
        return (
            "'ping_pong' needs at least two 'stages', 'do_stages' and 'ds_stages', and no "
            "score_mod above head dim 64; pass 'ping_pong': False"
        )
    if blocks.sums_bias and not (blocks.producer and may_sum_bias(size, blocks.bias_cluster)):
        return (
            f"'bias_cluster' is {blocks.bias_cluster}: it may be 2, 4 or 8, divide the number of "
            "batch entries that share the bias, and needs a producer warpgroup and a 16-bit bias "
            "with both axes as the only modifier; pass 'bias_cluster': 1"
        )
    hides = hides_keys(size)
    if blocks.split_q > 1 and size.is_listed:
        return "'split_q' excludes a block_mask; pass 'split_q': 1"
    if blocks.split_q > 1 and not blocks.mask_all and hides:
        return "'split_q' needs 'mask_all' where something hides keys; pass 'split_q': 1"
    if blocks.sums_bias and blocks.split_q > 1:
        return "'bias_cluster' and 'split_q' exclude each other; pass 'bias_cluster': 1"
    return None


# --- Tile sizes that are worth timing where the rules may not be the best -----------------------

# Each replaces fields of what the rules take. What only the rules know how to combine (which loops
# are masked, where polynomials pay next to modifiers, speculation) stays as it is.
_FORWARD = (
    {"warpgroups": 2, "block_kv": 128},
    {"warpgroups": 2, "block_kv": 96},
    {"warpgroups": 3, "block_kv": 64},
    {"warpgroups": 3, "block_kv": 128},
    {"persistent": False},
    {"packed": False},
)
_FUSED = (
    {"ping_pong": False},
    {"block_q": 64},
    {"block_q": 64, "stages": 4, "do_stages": 4},
    {"stages": 3, "do_stages": 3},
    {"stages": 2, "do_stages": 2},
    {"split_q": 1},
)
_DKV = ({"block_q": 128}, {"block_q": 64}, {"stages": 3}, {"do_stages": 1}, {"p_stages": 1})
_DQ = (
    {"block_kv": 128},
    {"block_kv": 64},
    {"k_stages": 3},
    {"v_stages": 1},
    {"v_stages": 2},
    {"warpgroups": 1, "block_kv": 64},
)
_PAIRED = (
    {"stagger": True},
    {"stagger": False},
    {"stages": 3},
    {"do_stages": 1},
)
CHANGES = {"forward": _FORWARD, "fused": _FUSED, "paired": _PAIRED, "dkv": _DKV, "dq": _DQ}
_WIDE = (
    *({"width": 64, "chunks": chunks} for chunks in (10, 8, 6, 5, 4)),
    *({"width": 128, "chunks": chunks} for chunks in (4, 3)),
    *({"width": 192, "chunks": chunks} for chunks in (3, 2)),
)


def candidates(problem: Problem, producer: bool, num_sms: int) -> dict[str, list[dict[str, Any]]]:
    """Returns the tile sizes that each kernel of a call can run with; those of the rules first.

    `producer` and `num_sms` are those of `choose_blocks`.
    """
    by_kernel = functools.partial(_by_kernel, problem, producer, num_sms)
    chosen = by_kernel(None)
    by_name = {}
    for kernel, blocks in chosen.items():
        tried = [blocks]
        for change in _WIDE if _is_wide(problem) else CHANGES[kernel]:
            try:
                tried.append(by_kernel({kernel: change})[kernel])
            except ValueError:  # they do not fit, or the kernel cannot take them
                continue
        by_name[kernel] = [dataclasses.asdict(b) for b in dict.fromkeys(tried)]
    return by_name


def _by_kernel(problem: Problem, producer: bool, num_sms: int, override: dict[str, Any] | None):
    blocks = choose_blocks(problem, override, producer, num_sms)
    backward = blocks.backward
    if isinstance(backward, WideGradients):
        return {"forward": blocks.forward, **vars(backward)}
    if isinstance(backward, SplitBlocks):
        return {"forward": blocks.forward, "dkv": backward.dkv, "dq": backward.dq}
    return {"forward": blocks.forward, kernel_of(backward): backward}
