"""Times a training step of a stack like Gemma 4's: five local layers, one global one.

    python -m benchmarks.run_stack --out results/stack.json

Local layers have heads of 256 columns and a window of 1,024 keys, the global one has heads of 512
and sees all keys before a query. Eight query heads share four heads of keys in the former and one
in the latter. A step is the loss of the next token and its gradient; bfloat16 but for parameters.
"""

from __future__ import annotations

import argparse
import functools
import os
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from flash_pallas import flash_attention
from flash_pallas.nn.linen import FlashAttention

from . import results, steps, tables, timing
from .run import prepare_process, probes

WIDTH, VOCABULARY, WINDOW, HEADS = 2048, 8192, 1024, 8
DTYPE = jnp.bfloat16
LOCAL, GLOBAL = (256, 4), (512, 1)  # head dim, heads of keys
LAYERS = (LOCAL,) * 5 + (GLOBAL,)


def dense(q, k, v, *, causal, window=None, **_):
    """Computes attention as jax.nn does without a kernel."""
    left = None if window is None else (window[0], 0)
    return jax.nn.dot_product_attention(
        q, k, v, is_causal=causal, local_window_size=left, implementation="xla"
    )


class Stack(nn.Module):
    """Decoder layers of these sizes between an embedding and its transpose."""

    attention: Callable
    layers: tuple[tuple[int, int], ...] = LAYERS

    @nn.compact
    def __call__(self, tokens):
        """Returns the logits [B, T, vocabulary] of tokens [B, T]."""
        embed = nn.Embed(VOCABULARY, WIDTH, dtype=DTYPE)
        x = embed(tokens)
        project = functools.partial(nn.Dense, use_bias=False, dtype=DTYPE)
        for head_dim, kv_heads in self.layers:
            attend = FlashAttention(
                num_heads=HEADS,
                num_kv_heads=kv_heads,
                head_dim=head_dim,
                causal=True,
                window=(WINDOW - 1, 0) if (head_dim, kv_heads) == LOCAL else None,
                rope_theta=10_000.0,
                qk_norm="rms",
                use_qkv_bias=False,
                use_out_bias=False,
                dtype=DTYPE,
                attention=self.attention,
            )
            x = x + attend(nn.RMSNorm(dtype=DTYPE)(x))
            y = nn.RMSNorm(dtype=DTYPE)(x)
            x = x + project(WIDTH)(nn.gelu(project(4 * WIDTH)(y)) * project(4 * WIDTH)(y))
        return embed.attend(nn.RMSNorm(dtype=DTYPE)(x))


def step_of(attention: Callable, layers=LAYERS):
    """Returns (params, tokens) -> (loss, gradient) of the stack with this attention function."""
    apply = Stack(attention, layers).apply

    def loss(params, tokens):
        logits = apply(params, tokens[:, :-1]).astype(jnp.float32)
        chosen = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - chosen)

    return jax.value_and_grad(loss)


def rows(arguments, timer) -> list[dict[str, Any]]:
    """Returns the rows of all lengths."""
    found = []
    for length in arguments.lengths:
        tokens = jax.random.randint(jax.random.key(0), (1, length + 1), 0, VOCABULARY)
        params = jax.jit(Stack(flash_attention).init)(jax.random.key(1), tokens[:, :64])
        count = sum(p.size for p in jax.tree.leaves(params))
        contestants = {"flash_attention": step_of(flash_attention), "dense jnp": step_of(dense)}
        some, _ = steps.compare(contestants, (params, tokens), timer, arguments.rounds)
        for row in some:
            row["shape"], row["parameters"] = f"1,{length}", count
            row["tokens_per_s"] = row["ms"] and length / row["ms"] * 1e3
            print(row, flush=True)
        found += some
    return found


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, required=True, help="results, a .json file")
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 32768])
    parser.add_argument("--rounds", type=int, default=6)
    return parser.parse_args(argv)


def main(arguments: argparse.Namespace) -> None:
    """Runs it and prints the table."""
    timer, log = timing.choose("cupti", probes())
    summary = (
        "tokens per second of the loss and its gradient, GiB besides parameters, data and results; "
        f"five layers of 256 with a window of {WINDOW}, one of 512, {WIDTH} wide, bfloat16; "
        f"{timer.name}; median of {arguments.rounds} interleaved rounds."
    )
    found = results.header("stack", {"summary": summary, "timer_check": log})
    found["rows"] = rows(arguments, timer)
    results.save(arguments.out, found)
    print(tables.render(found))


if __name__ == "__main__":
    given = parse(None)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    prepare_process(3600)
    main(given)
