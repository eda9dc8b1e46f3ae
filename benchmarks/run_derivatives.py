"""Times forward mode and Hessian-vector products.

    python -m benchmarks.run_derivatives --out results/derivatives.json

A row is one call of one provider, all of a shape in turns. No row without a right result: the error
of tangents may be three times that of blockwise jnp in the same dtype, both from the same in
float32.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import os
import pathlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import flash_pallas

from . import flops, gate, results, steps, suites, tables, timing
from .run import prepare_process, probes

JNP = "blockwise jnp"
# The rule of three of benchmarks/gate.py.
FACTOR = 3.0
DENSE_UP_TO = 4096  # queries: of dense jnp, whose scores take 4 bytes each


class Work(NamedTuple):
    """Transformation that is timed, and how many matmuls of scores it counts as; 0: no TFLOP/s."""

    name: str
    products: int


FORWARD, JVP, HVP = Work("forward", 2), Work("jvp", 6), Work("Hessian-vector product", 0)


class Cell(NamedTuple):
    """Sizes, mask and transformation of the calls that a row of each provider times."""

    shape: suites.Shape
    causal: bool
    work: Work

    @property
    def label(self) -> str:
        """Name in tables."""
        return f"{self.shape.label} {'causal' if self.causal else 'full'} {self.work.name}"


def _cells():
    sizes = ((4, 4096, 16, 128), (4, 4096, 32, 64), (1, 16384, 16, 128))
    for batch, length, heads, dim in sizes:
        shape = suites.Shape(batch, length, heads, heads, dim)
        for causal in (False, True):
            for work in (FORWARD, JVP, HVP):
                yield Cell(shape, causal, work)
    for length in (32768, 65536):
        yield Cell(suites.Shape(1, length, 16, 16, 128), True, HVP)


CELLS = tuple(_cells())


def attention(provider: str, causal: bool):
    """Returns (q, k, v) -> o of a provider.

    Raises:
        ImportError: it is not installed.
    """
    any_order = functools.partial(flash_pallas.flash_attention, causal=causal, differentiable="any")
    if provider == "fa4-jax":
        if importlib.util.find_spec("fa4_jax") is None:
            raise ImportError("fa4-jax is not installed")
        import fa4_jax

        return functools.partial(fa4_jax.flash_attn, causal=causal)
    if provider == "dense jnp":
        dense = jax.nn.dot_product_attention
        return functools.partial(dense, is_causal=causal, implementation="xla")
    return functools.partial(any_order, backend="xla") if provider == JNP else any_order


def program(cell: Cell, provider: str):
    """Returns the function of (q, k, v, do) that a row times; its results are arrays."""
    attend = attention(provider, cell.causal)
    if provider == "dense jnp" and cell.shape.q_len > DENSE_UP_TO:
        raise ValueError(f"more than {DENSE_UP_TO} queries")
    if cell.work == FORWARD:
        return lambda q, k, v, do: [attend(q, k, v)]
    tangents = lambda q, k, v: (jnp.flip(q, 1), jnp.flip(k, 1), jnp.flip(v, 1))
    if cell.work == JVP:
        return lambda q, k, v, do: jax.jvp(attend, (q, k, v), tangents(q, k, v))
    gradients = lambda do, *qkv: jax.vjp(attend, *qkv)[1](do)
    return lambda q, k, v, do: jax.jvp(
        functools.partial(gradients, do), (q, k, v), tangents(q, k, v)
    )[1]


def errors(found, exact) -> float:
    """Returns the largest relative root mean square of the difference of two lists of arrays."""
    size = lambda x: float(jnp.sqrt(jnp.mean(jnp.square(x.astype(jnp.float32)))))
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True)
    return max(size(a.astype(jnp.float32) - b) / size(b) for a, b in pairs)


def compiled(cell: Cell, provider: str, inputs):
    """Returns (compiled program, bytes that it needs besides its arguments and results)."""
    found = jax.jit(program(cell, provider)).lower(*inputs).compile()
    return found, found.memory_analysis().temp_size_in_bytes


def rows_of(cell: Cell, providers: list[str], timer, rounds: int) -> list[dict[str, Any]]:
    """Returns the rows of a cell."""
    inputs = gate.random_inputs(cell.shape)
    wide = [x.astype(jnp.float32) for x in inputs]
    exact = compiled(cell, JNP, wide)[0](*wide)
    limit = FACTOR * errors(compiled(cell, JNP, inputs)[0](*inputs), exact)
    launches, memory, refused, used = {}, {}, {}, {}
    for provider in providers:
        try:
            call, memory[provider] = compiled(cell, provider, inputs)
            used[provider] = errors(call(*inputs), exact) / limit
        except Exception as error:  # One that cannot run must not cost the others their numbers.
            refused[provider] = steps.reason(error)
            continue
        if not used[provider] <= 1.0:
            refused[provider] = f"wrong result: {used[provider]:.3g} times the allowed error"
            continue
        launches[provider] = timing.Launch(functools.partial(call, *inputs), "jax")
    del exact, wide
    samples, failures = timing.interleave(timer, launches, rounds)
    refused |= failures
    found = []
    for provider in providers:
        times = [x.ms for x in samples.get(provider, ())]
        ms, spread = timing.median_and_spread(times) if times else (None, None)
        pairs = flops.visible_pairs(cell.shape.q_len, cell.shape.kv_len, cell.causal)
        each = 2 * cell.shape.batch * cell.shape.q_heads * pairs * cell.shape.head_dim
        speed = each * cell.work.products / ms / 1e9 if ms and cell.work.products else None
        found.append(
            {
                "shape": cell.shape.label,
                "mask": "causal" if cell.causal else "full",
                "work": cell.work.name,
                "provider": provider,
                "refused": refused.get(provider),
                "ms": ms,
                "spread": spread,
                "tflops": speed,
                "temporary_bytes": memory.get(provider),
                "used_of_error": used.get(provider),
            }
        )
        print(found[-1], flush=True)
    return found


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, required=True, help="results, a .json file")
    parser.add_argument(
        "--only", nargs="*", default=[""], help="cells whose label has one of these"
    )
    default = ["flash_pallas", "fa4-jax", "dense jnp", JNP]
    parser.add_argument("--providers", type=lambda s: s.split(","), default=default)
    parser.add_argument("--rounds", type=int, default=8)
    return parser.parse_args(argv)


def main(arguments: argparse.Namespace) -> None:
    """Runs it and prints the table."""
    timer, log = timing.choose("cupti", probes())
    summary = (
        "ms, in parentheses TFLOP/s: two products a forward and six a jvp, whatever is computed; "
        f"GiB besides operands and results; bfloat16; {timer.name}; median of {arguments.rounds} "
        "interleaved rounds."
    )
    found = results.header("derivatives", {"summary": summary, "timer_check": log})
    found["rows"] = []
    for cell in CELLS:
        if any(part in cell.label for part in arguments.only):
            found["rows"] += rows_of(cell, arguments.providers, timer, arguments.rounds)
            results.save(arguments.out, found)
    print(tables.render(found))


if __name__ == "__main__":
    given = parse(None)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    prepare_process(3600)
    main(given)
