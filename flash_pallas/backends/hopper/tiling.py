"""Tile sizes of the Hopper kernels: what can be chosen, what is chosen, and why."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jaxlib.version

from ...core.problem import Problem
from ..gpu.launch import MOST_BARRIERS
from .backward import select
from .backward.fused.launches import may_launch, may_take_turns, may_write
from .backward.fused.tiles import FusedBlocks, may_sum_bias, without_sums
from .backward.select import SplitBlocks, choose_backward
from .backward.split.tiles import DkvBlocks, DqBlocks
from .common.pipeline import SMEM_LIMIT
from .decode.packed_forward import described, packs
from .forward import tiles
from .forward.tiles import (
    MOST_HALF,
    ForwardBlocks,
    choose_forward,
    without_producer,
)


@dataclasses.dataclass(frozen=True)
class HopperBlocks:
    """Tile sizes of every kernel that a call and its gradient run."""

    forward: ForwardBlocks
    backward: FusedBlocks | SplitBlocks


def trades_registers() -> bool:
    """Says whether the installed jaxlib compiles setmaxnreg, by which warpgroups trade registers.

    From 0.12 on its wheels compile Mosaic GPU kernels through nvJitLink, as code to be linked, in
    which the instruction has no effect (C7504). Three warpgroups then have 168 registers a thread;
    code made for 240 spills up to 1,300 bytes and has its wgmma serialised. Two have 255.
    """
    return jaxlib.version.__version_info__ < (0, 12)


def choose_blocks(
    problem: Problem, override: dict[str, Any] | None, producer: bool, num_sms: int
) -> HopperBlocks:
    """Chooses the tuned tile sizes, with fields replaced by `override`.

    Args:
        problem: the shapes.
        producer: whether the chosen blocks have a producer warpgroup, which takes
            `trades_registers`.
        num_sms: number of SMs that the tiles are to keep busy.
        override: for each kernel that runs (`"forward"`, `"fused"`, `"dkv"`, `"dq"`), a dict of the
            fields to replace, such as `{"forward": {"block_kv": 64}}`.

    Raises:
        ValueError: an unknown kernel or field, or tiles that do not fit.
    """
    chosen: dict[str, Any] = {"forward": choose_forward(problem, num_sms)}
    chosen["forward"] = dataclasses.replace(chosen["forward"], packed=packs(problem, num_sms))
    chosen |= choose_backward(problem, num_sms)
    if not producer:
        chosen = {name: _without_producer(b) for name, b in chosen.items()}
        chosen["forward"] = without_producer(chosen["forward"], problem)
    for kernel, fields in (override or {}).items():
        if kernel not in chosen:
            raise ValueError(
                f"blocks has {kernel!r}: on the hopper backend this call runs the kernels "
                f"{', '.join(map(repr, chosen))}; pass blocks={{'forward': {{'block_kv': 64}}}}"
            )
        if kernel == "forward":
            size = tiles.native_problem(problem)
        else:
            size = select.native_problem(problem, fused=kernel == "fused")
        chosen[kernel] = _replaced(kernel, chosen[kernel], fields, size, problem)
    if "fused" in chosen:
        return HopperBlocks(chosen["forward"], chosen["fused"])
    return HopperBlocks(chosen["forward"], SplitBlocks(chosen["dkv"], chosen["dq"]))


def _without_producer(blocks):
    if isinstance(blocks, FusedBlocks):
        blocks = dataclasses.replace(without_sums(blocks), first_alone=False)
    return dataclasses.replace(blocks, producer=False)


# The most that a field may be: registers for as many warpgroups, exponents of two whose squares
# float32 holds (of a lazy rescale float16 too), and the barriers of one array.
_MOST = {"warpgroups": 3, "speculates": 60.0, "lazy_rescale": MOST_HALF, "polynomials": 1.0}
_MOST |= {
    name: MOST_BARRIERS
    for blocks in (ForwardBlocks, FusedBlocks, DkvBlocks, DqBlocks)
    for name in vars(blocks())
    if name.endswith("stages")
}


def _replaced(kernel: str, blocks, fields, size, problem: Problem):
    names = {field.name for field in dataclasses.fields(blocks)}
    if not isinstance(fields, dict) or not names.issuperset(fields):
        raise ValueError(f"blocks[{kernel!r}] is {fields!r}: a dict with keys of {sorted(names)}")
    for name, value in fields.items():
        if reason := _misfit(name, value, type(getattr(blocks, name)), kernel):
            raise ValueError(f"blocks[{kernel!r}][{name!r}] is {value!r}: {reason}")
    try:
        replaced = dataclasses.replace(blocks, **fields)
    except ValueError as error:
        raise ValueError(f"blocks[{kernel!r}] is {fields!r}: {error}") from None
    if isinstance(replaced, ForwardBlocks) and replaced.packed and described(problem) is None:
        raise ValueError(
            "blocks['forward']['packed'] is True: the kernels of flash_decode do not take this call"
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
    unit = 64 if kernel == "fused" else 32
    if name.startswith("block_"):
        tile = type(value) is int and 0 < value <= 256 and value % unit == 0
        return None if tile else f"a multiple of {unit} up to 256"
    if type(value) is not kind:
        return "True or False" if kind is bool else f"of type {kind.__name__}"
    least, most = (1 if kind is int else 0.0), _MOST.get(name, math.inf)
    if kind is not bool and not least <= value <= most:  # a NaN neither
        return f"from {least} to {most}" if most < math.inf else f"at least {least}"
    return None


def _refused(blocks: FusedBlocks, size) -> str | None:
    """Returns why the fused backward cannot run with these blocks, or None."""
    if not blocks.runs(size.head_dim):
        return "'block_q' must be 128 for head dims up to 16"
    if blocks.alternate and not blocks.may_alternate:
        return (
            "warpgroups that alternate take at least two stages, do_stages and ds_stages and no "
            "late_dp; pass 'alternate': False too"
        )
    if blocks.sums_bias and not (blocks.producer and may_sum_bias(size, blocks.bias_cluster)):
        return (
            "'bias_cluster' may be 2, 4 or 8 with a producer warpgroup and a bias in 16 bits with "
            "both axes, without a mask or another modifier, that as many batch entries share or a "
            "multiple; pass 'bias_cluster': 1"
        )
    if not may_launch(size, blocks):
        return (
            "'launches' must divide the pairs of a key head and a batch entry into whole heads, or "
            "a head's entries into equal parts, and not stand beside 'parts'; 'key_launches' must "
            "divide the key blocks of a call that sums the gradient of a bias, of whole heads, "
            "without 'first_alone'; pass 'launches': 1, 'key_launches': 1 and 'first_alone': False"
        )
    if not may_take_turns(size, blocks):
        return (
            "CTAs that take several key blocks ('resident' and 'kv_stages') need a producer "
            "warpgroup, 'mask_all', no 'parts' and the same walk for every key block: no mask and "
            "no arrays that decide it; pass 'resident': 1 and 'kv_stages': 1"
        )
    if blocks.first_alone and not may_write(size, blocks):
        return (
            "'first_alone' takes two blocks of keys or more of which the first is seen by all "
            "queries, whatever arrays hold; pass 'first_alone': False"
        )
    if blocks.sums_bias and blocks.parts > 1:
        return "CTAs that add up the gradient of a bias share no walks; pass 'bias_cluster': 1"
    return None
