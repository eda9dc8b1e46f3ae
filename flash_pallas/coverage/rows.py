"""The list of calls, chosen by the tile sizes that the backends answer with."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ..backends.base import Backend
from ..backends.hopper import HopperBackend
from ..backends.hopper.backward.paired.tiles import PairedBlocks
from ..backends.portable import PortableBackend
from ..devices import DEVICES
from ..frontend import dispatch
from . import calls
from .calls import LONG, Row


@dataclasses.dataclass(frozen=True)
class Target:
    """A GPU whose kernels are run, on itself or on one that has more.

    Attributes:
        backend: name of the backend.
        capability: compute capability that tile sizes are chosen for.
        num_sms: number of SMs, likewise.
        interpret: run under the interpreter, on a CPU.
    """

    backend: str
    capability: str
    num_sms: int
    interpret: bool = False

    @classmethod
    def of(cls, backend: str, name: str) -> Target:
        """Returns the target of a GPU of `devices.DEVICES`."""
        device = DEVICES[name]
        return cls(backend, device.capability, device.sms)

    def make(self) -> Backend:
        """Returns the backend of this GPU."""
        kind = HopperBackend if self.backend == "hopper" else PortableBackend
        return kind(self.interpret, capability=self.capability, num_sms=self.num_sms)

    @contextlib.contextmanager
    def placed(self) -> Iterator[Backend]:
        """Makes calls of backend=self.backend run this one."""
        before, backend = dispatch.BACKENDS[self.backend], self.make()
        dispatch.BACKENDS[self.backend] = backend
        dispatch.forget_tiles()
        try:
            yield backend
        finally:
            dispatch.BACKENDS[self.backend] = before
            dispatch.forget_tiles()


# Kilobytes of shared memory decide which tiles the portable kernels have: H200, A100, and L40S and
# RTX 4090.
TARGETS = {
    "hopper": Target.of("hopper", "h200"),
    "portable-227": Target.of("portable", "h200"),
    "portable-163": Target.of("portable", "a100"),
    "portable-99": Target.of("portable", "l40s"),
}


# --- What a row runs ------------------------------------------------------------------------------


def override(row: Row, target: Target) -> dict[str, Any] | None:
    """Returns `blocks` of the call; None where the backend is to choose."""
    sizes = next((LONG[name] for name in row.options if name in LONG), None)
    if sizes is None:
        return None
    problem, (batch, length, kv_heads) = problem_of(row), sizes
    heads = kv_heads * problem.group
    lengthened = lambda shape: (
        shape
        and tuple(
            1 if size == 1 else full
            for size, full in zip(shape, (batch, heads, length, length), strict=True)
        )
    )
    problem = dataclasses.replace(
        problem,
        batch=1 if row.function == "varlen" else batch,
        q_len=length,
        kv_len=length,
        q_heads=heads,
        kv_heads=kv_heads,
        bias_shape=lengthened(problem.bias_shape),
        mask_shape=lengthened(problem.mask_shape),
    )
    return by_kernel(target.make().attention.plan(problem))


def by_kernel(blocks: Any) -> dict[str, Any]:
    """Returns the tile sizes of hopper's kernels as `blocks` takes them."""
    backward = blocks.backward
    if not hasattr(backward, "block_kv"):
        parts = vars(backward)  # of several kernels
    else:
        parts = {"paired" if isinstance(backward, PairedBlocks) else "fused": backward}
    tiles = {"forward": blocks.forward, **parts}
    return {name: dataclasses.asdict(tile) for name, tile in tiles.items()}


BASE = 64  # head dim of the call whose problem others are derived from


@functools.cache
def _base(row: Row) -> Any:
    return calls.explained(row, "xla").problem


def problem_of(row: Row) -> Any:
    """Returns the problem that a backend is asked about."""
    plain = dataclasses.replace(
        row, target="", wanted="output", head_dim=BASE, v_head_dim=min(BASE, row.v_head_dim)
    )
    sizes = {"head_dim": row.head_dim, "v_head_dim": row.v_head_dim}
    problem, scale = _base(plain), 1.0 / math.sqrt(row.head_dim)
    if row.function == "ragged":
        return dataclasses.replace(problem, steps=_resized(problem.steps, sizes, scale))
    return _resized(problem, sizes, scale)


def _resized(problem: Any, sizes: dict[str, int], scale: float) -> Any:
    spec = dataclasses.replace(problem.spec, scale=scale)
    if getattr(spec, "v_columns", None) is not None:
        spec = dataclasses.replace(spec, v_columns=sizes["v_head_dim"])
    return dataclasses.replace(problem, spec=spec, **sizes)


@functools.cache
def plan(row: Row, target: Target) -> Any:
    """Returns the tile sizes of every kernel that a row runs; None if the backend has none."""
    if "values in keys" in row.options and row.v_head_dim > row.head_dim:
        return None
    backend, problem = target.make(), problem_of(row)
    if row.function == "decode":
        refused = backend.decode.refusal(problem)
        return None if refused else backend.decode.plan(problem)
    if row.function == "ragged":
        if backend.ragged.refusal(problem):
            return None
        blocks = backend.ragged.plan(problem)
        return blocks if blocks.chunks_on == backend.name else blocks.steps
    if backend.attention.refusal(problem):
        return None
    try:
        blocks = backend.attention.plan(problem, override(row, target))
    except ValueError:  # tiles of a longer call do not fit these lengths
        return None
    if row.wanted == "gradient":
        return blocks
    moves = frozenset(calls.moving(row, calls.recipes(row)))
    moves = frozenset("score_params" if name == "strength" else name for name in moves)
    if row.wanted == "hessian":
        refused = backend.jvp_of_vjp.refusal(problem, moves, moves)
    else:
        primal = row.wanted == "tangents"
        refused = backend.jvp.refusal(problem, blocks, moves, primal=primal)
    tiles = blocks.backward if row.wanted == "hessian" else blocks.forward
    return None if refused else (row.wanted, tiles)


# --- Head dims ------------------------------------------------------------------------------------

NARROW = tuple(range(8, 257, 8))
WIDE = tuple(range(264, 577, 8))
PAIRS = (
    *((192, 128), (128, 64), (64, 128), (96, 64), (40, 72), (256, 128), (128, 256), (64, 256)),
    *((320, 256), (512, 128), (264, 24), (24, 264), (128, 512), (576, 512)),
)
DECODE_PAIRS = (*PAIRS, (576, 256), (576, 64), (192, 512))
HALVES = ("bfloat16", "float16")
# Where options are tried one by one: sizes that kernels have and such that they fill up. The second
# and third portable GPU, whose tiles are mostly those of the first, have each option at half
# of a few sizes. The three share the head dims of what has every option.
SOME = (64, 96, 128, 136, 192, 256, 264, 384, 512, 576)
FEW = (64, 128, 192, 256, 512, 576)
PORTABLE = ("portable-227", "portable-163", "portable-99")
OTHERS = PORTABLE[1:]

# --- Options --------------------------------------------------------------------------------------

EVERYTHING = (
    *("causal", "window", "softcap", "bias", "mask", "ALiBi", "sinks", "dropout", "segments"),
    *("lengths", "traced offset", "score_mod", "mask_mod", "GQA"),
)
LISTED = (*(name for name in EVERYTHING if name != "traced offset"), "lists")
ALONE = (
    *EVERYTHING,
    *("lists", "positions", "traced window", "float32 bias", "shared bias", "bias of keys"),
    *("bias of queries", "bias without gradient", "mask of keys", "causal at an offset"),
    *("few queries", "whole tiles", "large logits"),
)
# Calls of Hopper with so many entries that some launches are of rows with large logits alone.
MANY = (
    ("many entries",),
    ("causal", "many entries"),
    ("causal", "large logits", "many entries"),
    ("large logits", "shared bias", "many entries"),
)
# What often comes together, and has tiles or loops of its own.
TOGETHER = (
    ("causal", "GQA"),
    ("causal", "window"),
    ("causal", "whole tiles"),
    ("causal", "large logits"),
    ("causal", "lists"),
    ("lists", "mask_mod"),
    ("causal", "bias"),
    ("causal", "dropout"),
    ("causal", "segments"),
    ("softcap", "causal", "window"),
    ("bias", "mask"),
    ("softcap", "hiding bias"),
    ("score_mod", "hiding bias"),
    ("segments", "positions"),
)
# Of tangents, which have the loops of the forward.
MOVED = (
    *("causal", "window", "softcap", "bias", "mask", "ALiBi", "sinks", "dropout", "segments"),
    *("lengths", "score_mod", "mask_mod", "GQA", "lists", "few queries", "whole tiles"),
)
VARLEN = (
    *("causal", "window", "softcap", "ALiBi", "sinks", "dropout", "score_mod", "mask_mod", "GQA"),
    *("bias", "mask", "other keys"),
)
DECODE = (
    *("window", "traced window", "softcap", "sinks", "ALiBi", "starts", "traced offset"),
    *("three splits", "pages of 16", "pages of 64", "pages of 128", "pages of 256", "24 rows"),
    *("96 rows", "values in keys", "blocks"),
)
DECODE_TOGETHER = (
    ("24 rows", "drafts"),
    ("24 rows", "drafts", "traced window"),
    ("24 rows", "drafts", "window", "pages of 16", "sinks", "softcap"),
    ("24 rows", "drafts", "traced window", "ALiBi"),
    ("96 rows", "drafts", "window"),
    ("pages of 64", "blocks"),
    ("pages of 64", "shared prefix"),
    ("24 rows", "pages of 16", "shared prefix"),
    ("values in keys", "64 heads"),
    ("values in keys", "64 heads", "pages of 64", "sinks"),
    ("values in keys", "24 rows", "pages of 64"),
    ("24 rows", "window", "starts"),
)
RINGS = (
    ("ring of 256", "window"),
    ("ring of 112", "window", "softcap", "sinks", "ALiBi", "three splits"),
)
SCALED = (
    ("scales",),
    ("scales of rows",),
    ("pages of 64", "scales of rows"),
    ("24 rows", "pages of 64", "scales of rows"),
    ("96 rows", "pages of 64", "scales"),
    ("values in keys", "scales"),
)
# By the number of rows; pages in one of them.
DECODE_ALL = ("traced window", "softcap", "sinks", "ALiBi", "starts", "three splits")
RAGGED = (
    *("window", "traced window", "softcap", "sinks", "ALiBi", "starts", "three splits"),
    *("steps of 4", "steps of 8", "values in keys", "shared prefix"),
)
RAGGED_ALL = ("traced window", "softcap", "sinks", "ALiBi", "starts")


# --- The list -------------------------------------------------------------------------------------


def rows(targets: dict[str, Target]) -> list[Row]:
    """Returns every row of these targets, what matters most first.

    Of portable targets with the same tiles for a call, the first has the row.
    """
    distinct: dict[Row, None] = {}
    seen = set()
    for name, target in targets.items():
        for row in _of_target(name, target):
            tiles = plan(row, target)
            if tiles is None:
                continue
            # A deterministic backward has tiles of its own, or is what runs anyway.
            told_by_tiles = (*LONG, "deterministic")
            options = tuple(name for name in row.options if name not in told_by_tiles)
            identity = dataclasses.replace(row, target=target.backend, options=options), tiles
            if identity not in seen:
                seen.add(identity)
                distinct[row] = None
    return sorted(distinct, key=_priority)


def _priority(row: Row) -> int:
    """Returns a small number for what is run first: decoding, then what is plain."""
    return 0 if row.function == "decode" else 1 if not row.options else 2


def _of_target(name: str, target: Target) -> Iterator[Row]:
    for make in (_decodes, _ragged, _gradients, _of_many_entries, _tangents, _varlen):
        yield from make(name, target)


def _by_plan(target: Target, rows: Iterable[Row]) -> Iterator[Row]:
    """Yields one of these rows for each plan: the last."""
    chosen = {plan(row, target): row for row in rows}
    chosen.pop(None, None)
    yield from chosen.values()


def _at(rows: Iterable[Row], options: tuple[str, ...]) -> list[Row]:
    return [dataclasses.replace(row, options=options) for row in rows]


def _longer(rows: Iterable[Row], options: tuple[str, ...]) -> list[Row]:
    """Returns rows with the tiles of longer calls, which portable kernels have anyway."""
    hopper = [row for row in rows if row.target == "hopper"]
    return [row for name in LONG for row in _at(hopper, (*options, name))]


def _some(rows: Iterable[Row], options: tuple[str, ...]) -> list[Row]:
    turn = zlib.crc32(" ".join(options).encode()) % 2
    candidates = _at(rows, options)
    return [row for row in candidates if row.head_dim in _dims(row, turn) and _is_square(row)]


def _dims(row: Row, turn: int) -> tuple[int, ...]:
    """Returns the head dims that an option is tried at."""
    if row.target not in OTHERS:
        return SOME
    if row.function in ("decode", "ragged"):  # the tiles, and the rows, of the first
        return FEW
    return FEW[(turn + OTHERS.index(row.target)) % 2 :: 2]


def _is_square(row: Row) -> bool:
    return row.v_head_dim == min(row.head_dim, 512)


def _all(target: Target, rows: Sequence[Row], options: tuple[str, ...]) -> list[Row]:
    """Returns rows with all these options: for a portable GPU its share, and one for each plan."""
    rows = _at(rows, options)
    if target.backend == "hopper":
        return rows
    share = rows[PORTABLE.index(rows[0].target) :: 3] if rows[0].target in PORTABLE else rows
    return list(dict.fromkeys((*_by_plan(target, rows), *share)))


def _gradients(name: str, target: Target) -> Iterator[Row]:
    dims = [(h, h) for h in (*NARROW, *WIDE)]
    rows_of = lambda dtype: [
        Row(name, "attention", "gradient", h, hv, dtype) for h, hv in (*dims, *PAIRS)
    ]
    for dtype in (*HALVES, "float32"):
        every = rows_of(dtype)
        if dtype == "float16":
            for options in ((), EVERYTHING):
                yield from _by_plan(target, _at(every, options))
            continue
        yield from _at(every, ())
        yield from _all(target, every, EVERYTHING)
        for options in ((), EVERYTHING):
            yield from _longer(every, options)
        if dtype == "float32":
            continue
        is_other = name in OTHERS
        exact = _at(every, ("deterministic",))
        yield from _by_plan(target, exact) if is_other else exact
        option_sets = [*((x,) for x in ALONE), LISTED, (*EVERYTHING, "deterministic")]
        for options in (
            option_sets if is_other else (*option_sets, *TOGETHER, ("deterministic", "causal"))
        ):
            if target.backend == "hopper":
                yield from _by_plan(target, _longer(_some(every, options), options))
            else:
                yield from _by_plan(target, _some(every, options))


def _of_many_entries(name: str, target: Target) -> Iterator[Row]:
    if target.backend != "hopper":
        return
    for options, dtype in itertools.product(MANY, HALVES):
        for head_dim in (64, 56, 40) if dtype == "bfloat16" else (64,):
            yield Row(name, "attention", "gradient", head_dim, head_dim, dtype, options)


def _tangents(name: str, target: Target) -> Iterator[Row]:
    for wanted in ("tangents", "linear", "hessian"):
        every = [Row(name, "attention", wanted, h, h, "bfloat16") for h in NARROW]
        yield from every
        of_pairs = [Row(name, "attention", wanted, h, hv, "bfloat16") for h, hv in PAIRS]
        yield from of_pairs
        halves = [dataclasses.replace(row, dtype="float16") for row in every]
        yield from _by_plan(target, halves)
        for options in (*((x,) for x in MOVED), EVERYTHING, LISTED):
            yield from _by_plan(target, _some(every, options))


def _varlen(name: str, target: Target) -> Iterator[Row]:
    every = [Row(name, "varlen", "gradient", h, h, "bfloat16") for h in (*NARROW, *WIDE)]
    for options in ((), ("causal",), *((x,) for x in VARLEN), VARLEN):
        yield from _by_plan(target, _some(every, options))
    for options in ((), ("causal",), VARLEN):
        yield from _by_plan(target, _longer(_some(every, options), options))


def _decodes(name: str, target: Target) -> Iterator[Row]:
    dims = [(h, min(h, 512)) for h in (*NARROW, *WIDE)]
    rows_of = lambda dtype: [
        Row(name, "decode", "output", *p, dtype) for p in (*dims, *DECODE_PAIRS)
    ]
    every, halves = rows_of("bfloat16"), rows_of("float16")
    paged = ("24 rows", "pages of 64")
    for options in ((), (*paged, *DECODE_ALL)):
        yield from _at(every, options)
        yield from _by_plan(target, _at(halves, options))
    everything = *DECODE_ALL, "values in keys"
    for options in (*((x,) for x in DECODE), *DECODE_TOGETHER, *RINGS, everything):
        yield from _by_plan(target, _some(every, options))
    for cache in calls.EIGHT_BITS:
        yield from _at(every, (cache,))
        yield from _at(every, (cache, *paged, "scales of rows", *DECODE_ALL))
        tried = [*SCALED, *((x,) for x in DECODE), *DECODE_TOGETHER]
        for options in tried if cache == "int8" else SCALED:
            yield from _by_plan(target, _some(every, (cache, *options)))
        for options in ((), ("24 rows", "scales")):
            yield from _by_plan(target, _some(halves, (cache, *options)))


def _ragged(name: str, target: Target) -> Iterator[Row]:
    dims = [(h, min(h, 512)) for h in (*NARROW, *WIDE)]
    every = [Row(name, "ragged", "output", *p, "bfloat16") for p in (*dims, *DECODE_PAIRS)]
    pages = ("pages of 64",)
    if name not in OTHERS:
        yield from _at(every, (*pages, *RAGGED_ALL))
    for options in ((), *((x,) for x in RAGGED), RAGGED_ALL):
        yield from _by_plan(target, _some(every, (*pages, *options)))
    scaled = ("scales",), ("scales of rows",), (*RAGGED_ALL, "scales"), ("steps of 8", "scales")
    for options in ((), *scaled):
        for cache in calls.EIGHT_BITS:
            yield from _by_plan(target, _some(every, (*pages, cache, *options)))
    for size in (16, 128, 256):
        yield from _by_plan(target, _some(every, (f"pages of {size}",)))
