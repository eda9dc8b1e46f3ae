"""Peak memory of forward and backward against T, one provider to a process.

An allocator's peak never falls, so lengths run upwards, each is a new peak, and a provider gets a
process of its own: python -m benchmarks.memory PROVIDER prints one JSON row per length.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import jax

import flash_pallas

from . import gate, suites
from .timing import torch_or_none

_flash = functools.partial(flash_pallas.flash_attention, causal=True)
_jax_nn = functools.partial(jax.nn.dot_product_attention, is_causal=True)
JAX_ATTENTION = {
    "flash_pallas": functools.partial(_flash, backend="hopper"),
    "flash_pallas_deterministic": functools.partial(_flash, backend="hopper", deterministic=True),
    "flash_pallas_xla": functools.partial(_flash, backend="xla"),
    "jax_cudnn": functools.partial(_jax_nn, implementation="cudnn"),
    "jax_xla": functools.partial(_jax_nn, implementation="xla"),
}
DEFAULT_PROVIDERS = (
    "flash_pallas",
    "flash_pallas_deterministic",
    "flash_pallas_xla",
    "torch_cudnn",
    "jax_cudnn",
    "jax_xla",
)


def measure_jax(provider: str, shape: suites.Shape) -> dict[str, Any]:
    """Measures the bytes of one causal forward and backward in jax, inputs and gradients included.

    Returns:
        `planned`, what XLA's buffer assignment says, and `measured`, the allocator's peak (None
        where the device keeps no statistics, as on a CPU, or where the peak did not rise).
    """
    attention = JAX_ATTENTION[provider]
    inputs = gate.random_inputs(shape)

    def gradients(q, k, v, do):
        o, pullback = jax.vjp(attention, q, k, v)
        return o, pullback(do)

    step = jax.jit(gradients).lower(*inputs).compile()
    plan = step.memory_analysis()
    planned = (
        plan.argument_size_in_bytes + plan.output_size_in_bytes + plan.temp_size_in_bytes
    ) - plan.alias_size_in_bytes
    stats = jax.local_devices()[0].memory_stats() or {}
    before = stats.get("peak_bytes_in_use")
    jax.block_until_ready(step(*inputs))
    stats = jax.local_devices()[0].memory_stats() or {}
    peak = stats.get("peak_bytes_in_use")
    # A peak that did not rise was set by something else (a shorter length, or tuning).
    measured = peak if before is None or peak is None or peak > before else None
    return {"planned": planned, "measured": measured}


def measure_torch(shape: suites.Shape) -> dict[str, Any]:
    """Measures the same in PyTorch on cuDNN; `planned` is None."""
    torch = torch_or_none()
    if torch is None:
        raise NotImplementedError("torch with a GPU is not installed")
    import torch.nn.attention

    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    size = (shape.batch, shape.q_len, shape.q_heads, shape.head_dim)
    make = lambda: torch.randn(size, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    q, k, v, do = (make().requires_grad_() for _ in range(4))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
        o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        torch.autograd.grad(o, (q, k, v), do.detach())
    torch.cuda.synchronize()
    return {"planned": None, "measured": torch.cuda.max_memory_allocated()}


def measure(provider: str, lengths) -> Iterator[dict[str, Any]]:
    """Yields one row per length, up to the first that fails (longer ones would fail too)."""
    for length in sorted(lengths):
        shape = dataclasses.replace(suites.MEMORY_SHAPE, q_len=length)
        row = {"provider": provider, "q_len": length, "planned": None, "measured": None}
        try:
            is_torch = provider == "torch_cudnn"
            found = measure_torch(shape) if is_torch else measure_jax(provider, shape)
        except Exception as error:  # Out of memory has a different type in each framework.
            yield {**row, "refused": f"{type(error).__name__}: {str(error)[:300]}"}
            return
        yield {**row, "refused": None, **found}


def run_suite(providers, lengths=suites.MEMORY_LENGTHS, timeout: int = 240) -> list[dict[str, Any]]:
    """Returns all rows, each provider measured by a fresh process within `timeout` seconds."""
    rows = []
    for provider in providers:
        command = [sys.executable, "-m", "benchmarks.memory", provider, *map(str, lengths)]
        lines, problem = [], None
        try:
            run = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
            lines = run.stdout.splitlines()
            problem = run.stderr[-300:] if run.returncode else None
        except subprocess.TimeoutExpired as error:
            lines = (error.stdout or b"").decode().splitlines()
            problem = f"no answer in {timeout} s"
        found = [json.loads(line) for line in lines if line.startswith("{")]
        if problem is not None:
            row = {"provider": provider, "q_len": None, "planned": None, "measured": None}
            found.append({**row, "refused": problem})
        rows += found
    return rows


def main() -> None:
    """Prints rows as JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("provider", choices=[*JAX_ATTENTION, "torch_cudnn"])
    parser.add_argument("lengths", nargs="*", type=int, default=list(suites.MEMORY_LENGTHS))
    arguments = parser.parse_args()
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    for row in measure(arguments.provider, arguments.lengths):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
