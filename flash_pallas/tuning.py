"""Autotuning: times tile sizes for one call on the user's device, and remembers the fastest."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import logging
import math
import operator
import pathlib
import statistics
import time
from typing import Any, NamedTuple

import jax
from jax import lax

from .api import flash_attention
from .backends.base import Backend
from .frontend import dispatch, tables, validate
from .frontend.arguments import Arguments
from .frontend.validate import Call, same_arguments
from .transforms import derivatives

ROUNDS = 7
TARGET_SECONDS = 0.015  # of one reading: long against the host's part, short against the clocks'
ASSUMED_FLOPS = 4e14  # per second, to guess how many calls that is
# Readings of equal programs differ by 1 %: what gains less is not worth leaving the rules for.
LEAST_GAIN = 1.02

_log = logging.getLogger("flash_pallas")


@dataclasses.dataclass(frozen=True, repr=False)
class Tuning:
    """Results of `autotune`. Its `repr` shows them as a table.

    Attributes:
        blocks: the tile sizes with which this call now runs, in the form that `blocks=` takes. It
            has only the kernels for which the default choice was not the fastest.
        gain: by kernel, the speed relative to the default choice.
        times: by kernel, all candidates that ran, the default choice first, as pairs of fields and
            milliseconds.
        path: the file that stores the results.
    """

    blocks: dict[str, dict[str, Any]]
    gain: dict[str, float]
    times: dict[str, list[tuple[dict[str, Any], float]]]
    path: pathlib.Path

    def __repr__(self) -> str:
        lines = [str(self.path)]
        for kernel, timed in self.times.items():
            rules = timed[0][0]
            for fields, ms in timed:
                changed = {name: x for name, x in fields.items() if x != rules[name]}
                mark = " <" if fields == self.blocks.get(kernel, rules) else ""
                lines.append(f"  {kernel} {ms:8.3f} ms  {changed or 'as the rules say'}{mark}")
        return "\n".join(lines)


@same_arguments(flash_attention)
def autotune(q, k, v, *, backend="auto", blocks=None, **options) -> Tuning:
    """Times tile sizes of `flash_attention` for one call, and stores those faster than the default.

    From then on, exactly this call (the same sizes, dtypes, masks and options) runs with the stored
    tile sizes. This holds for this process and for every later one of the same user on the same
    kind of device with the same minor version of jaxlib. Programs that are already compiled do not
    change. Results change only by rounding, as with `blocks=`. The default choice is that of the
    built-in rules. Autotuning takes about a second for each of about a dozen tile sizes, mostly for
    compilation.

    The table is a JSON file in the folder that the environment variable FLASH_PALLAS_CACHE_DIR
    names, or else in the folder flash_pallas under XDG_CACHE_HOME or ~/.cache. `explain` names the
    file if it determines the tile sizes. If several hosts run one program, give all of them the
    same table. Under vmap, the sizes of one member count.

    Args:
        q: as in `flash_attention`, as are all the others. The values are used, so that anything
            that depends on data is timed with your data.
        k: keys.
        v: values.
        backend: name of the backend.
        blocks: must be None.
        **options: every other argument of `flash_attention`.

    Returns:
        A `Tuning`; print it to see the table. The backward pass is that of q, k and v.

    Raises:
        TypeError: the call is under jit.
        Exception: the same exceptions as `flash_attention`.
        UnsupportedByBackend: the backend has no tile sizes to choose from, or there is no GPU.
        ValueError: there is nothing to compute, blocks were given, or the call has a score_mod or
            mask_mod, under which no result can be stored because functions have no name.
        OSError: the table cannot be written.

    Example:
        >>> import jax.numpy as jnp
        >>> from flash_pallas import UnsupportedByBackend, autotune
        >>> x = jnp.ones((2, 256, 4, 64), jnp.bfloat16)
        >>> try:
        ...     print(autotune(x, x, x, causal=True))
        ... except UnsupportedByBackend:
        ...     print("not without a Hopper GPU")
        not without a Hopper GPU
    """
    if blocks is not None:
        raise ValueError("blocks is what autotune looks for: leave it out")
    return prepare(q, k, v, Arguments(**options), backend).run()


def prepare(q, k, v, arguments: Arguments, backend: str = "auto") -> Trial:
    """Checks a call of `autotune` and compiles what it times. Nothing is timed or stored.

    Raises:
        Exception: the same exceptions as `autotune`.
    """
    call = validate.canonicalize(q, k, v, arguments)
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(call.operands)):
        raise TypeError("autotune runs kernels and takes their time: call it outside of jit")
    if call.problem.is_empty:
        raise ValueError("there is no query or no key, so nothing to time")
    chosen = dispatch.tunable(call.problem, backend)
    name = tables.key(chosen.name, call.problem)
    if name is None:
        raise ValueError(
            "a call with score_mod, mask_mod or a block_mask made from one has no name to store "
            "tile sizes by: pass blocks="
        )
    path = tables.user_path()
    tables.check_writable(path)  # before timing, which takes a minute
    return Trial(name, path, compiled(chosen, call))


class Program(NamedTuple):
    """A compiled program of `count` calls with one choice of tile sizes; runs as program(*args)."""

    fields: dict[str, Any]
    program: jax.stages.Compiled
    args: tuple
    count: int


@dataclasses.dataclass(frozen=True)
class Trial:
    """Programs that `autotune` times: the name of a call, its table, and candidates by kernel."""

    name: str
    path: pathlib.Path
    programs: dict[str, list[Program]]

    def run(self) -> Tuning:
        """Times every kernel's candidates and stores the fastest.

        Raises:
            OSError: the table cannot be written.
        """
        blocks, gain, times = {}, {}, {}
        for kernel, programs in self.programs.items():
            runtimes = readings(programs)
            best, ratio = fastest(runtimes)
            gain[kernel] = round(ratio, 3)
            if best:
                blocks[kernel] = programs[best].fields
            medians = map(statistics.median, runtimes)
            times[kernel] = [(p.fields, ms) for p, ms in zip(programs, medians, strict=True)]
        tables.store(self.path, self.name, blocks, gain)
        dispatch.forget_tiles()
        return Tuning(blocks, gain, times, self.path)


def compiled(backend: Backend, call: Call) -> dict[str, list[Program]]:
    """Compiles the candidates of each kernel that has several. Candidates that fail are left out.

    The default choice comes first.

    Raises:
        Exception: the error of the compiler, if even the default choice does not compile.
    """
    jobs = []
    residuals = _residuals(backend, call)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        for kernel, candidates in backend.attention.candidates(call.problem).items():
            build = _forward if kernel == "forward" else _backward
            for fields in candidates if len(candidates) > 1 else ():
                tiles = backend.attention.plan(call.problem, {kernel: fields})
                jobs.append((kernel, fields, pool.submit(build, backend, call, tiles, residuals)))
    programs: dict[str, list[Program]] = {}
    for kernel, fields, job in jobs:
        error = job.exception()
        if error is None:
            programs.setdefault(kernel, []).append(Program(fields, *job.result()))
        elif kernel not in programs:  # the first is the rules' choice
            raise error
        else:
            _log.info("autotune passes over %s of %s: %s", fields, kernel, error)
    return programs


def _residuals(backend: Backend, call: Call):
    """Computes the residuals from which the backward pass starts: the leaves of the pullback."""
    tiles = backend.attention.plan(call.problem)
    save = jax.jit(lambda operands: _pullback(backend, call, tiles, operands))
    return jax.tree.leaves(save(call.operands))


def _pullback(backend: Backend, call: Call, tiles, operands):
    attend = lambda q, k, v: _attend(backend, call, tiles, operands._replace(q=q, k=k, v=v))
    _, pullback = jax.vjp(attend, *operands[:3])
    return pullback


def _attend(backend: Backend, call: Call, tiles, operands):
    outputs: Any = derivatives.attend(backend, call.spec, tiles, operands)
    return outputs[0]


def _forward(backend: Backend, call: Call, tiles, residuals):
    """Returns (program, arguments, number of calls) of the forward."""
    del residuals
    count = _repetitions(call, products=2)

    def run(operands):
        step = lambda q: _attend(backend, call, tiles, operands._replace(q=q))
        return _repeated(step, operands.q, count)

    args = (call.operands,)
    return jax.jit(run).lower(*args).compile(), args, count


def _backward(backend: Backend, call: Call, tiles, residuals):
    """Returns (program, arguments, number of calls) of the pullback.

    Its residuals are the same with all tile sizes.
    """
    p, count = call.problem, _repetitions(call, products=5)
    trace = lambda operands: _pullback(backend, call, tiles, operands)
    form = jax.tree.structure(jax.eval_shape(trace, call.operands))

    def run(residuals, do):
        pull = jax.tree.unflatten(form, residuals)
        return _repeated(pull, do, count)

    shape = (p.batch, p.q_len, p.q_heads, p.v_head_dim)
    args = residuals, jax.random.normal(jax.random.key(0), shape, p.dtype)
    return jax.jit(run).lower(*args).compile(), args, count


def _repetitions(call: Call, products: int) -> int:
    """Returns the number of calls in one reading."""
    p = call.problem
    flops = 2 * products * p.batch * p.q_heads * p.q_len * p.kv_len * p.head_dim
    return min(max(math.ceil(TARGET_SECONDS * ASSUMED_FLOPS / flops), 4), 200)


def _repeated(step, x, count: int):
    """Runs step(x) `count` times in one program, so that no reading includes time of the host.

    Each call waits for the previous one: a zero computed from all of its results is added to one
    element of x. All results are needed, because XLA drops the kernel of a result that nobody
    reads.
    """
    first = (0,) * x.ndim
    size = (1,) * x.ndim

    def body(x, _):
        head = lax.dynamic_slice(x, first, size)
        for y in jax.tree.leaves(step(x)):
            element = lax.dynamic_slice(y, (0,) * y.ndim, (1,) * y.ndim)
            head = head + 0 * element.reshape(size).astype(x.dtype)
        return lax.dynamic_update_slice(x, head, first), None

    return lax.scan(body, x, length=count)[0]


def milliseconds(program: Program) -> float:
    """Measures the time of one call in milliseconds."""
    begin = time.perf_counter()
    jax.block_until_ready(program.program(*program.args))
    return (time.perf_counter() - begin) * 1e3 / program.count


def readings(programs: list[Program]) -> list[list[float]]:
    """Measures every program once per round. Each round starts with a different program.

    Clocks drift by 10 % within minutes, so only times of the same round are comparable.
    """
    for program in programs:
        milliseconds(program)  # the first run loads the kernel
    runtimes: list[list[float]] = [[] for _ in programs]
    for turn in range(ROUNDS):
        first = turn % len(programs)
        for index in [*range(first, len(programs)), *range(first)]:
            runtimes[index].append(milliseconds(programs[index]))
    return runtimes


def fastest(times: list[list[float]]) -> tuple[int, float]:
    """Returns (index of the fastest, its speed relative to the first); (0, 1.0) for a small gain.

    A gain is small if it is below LEAST_GAIN.
    """
    first = times[0]
    ratios = [statistics.median(map(operator.truediv, first, mine)) for mine in times]
    best = max(range(len(ratios)), key=ratios.__getitem__)
    return (best, ratios[best]) if ratios[best] >= LEAST_GAIN else (0, 1.0)
