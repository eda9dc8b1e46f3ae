"""Finds the extreme eigenvalues of the Hessian of a language model's loss, by Lanczos.

    python examples/hessian.py

The Hessian is never formed. Its product with a vector is forward mode over reverse mode, the
tangent of the gradient along the vector, and costs a few gradients. Lanczos needs nothing else
(https://arxiv.org/abs/1901.10159). The largest eigenvalue, the sharpness, limits the step size of
gradient descent: beyond 2 / sharpness it diverges, and training moves towards that limit
(https://arxiv.org/abs/2103.00065).
"""

from __future__ import annotations

import argparse
import functools
import pathlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax.flatten_util import ravel_pytree

from flash_pallas import flash_attention
from flash_pallas.nn.linen import FlashAttention


class LanguageModel(nn.Module):
    """A causal transformer that maps tokens [B, T] to the logits of the next one."""

    vocabulary: int
    layers: int
    width: int
    heads: int = 2
    attention: Callable = flash_attention

    @nn.compact
    def __call__(self, tokens):
        """Returns logits [B, T, vocabulary]."""
        x = nn.Embed(self.vocabulary, self.width)(tokens)
        for _ in range(self.layers):
            attention = FlashAttention(
                self.heads,
                causal=True,
                rope_theta=10_000.0,
                differentiable="any",
                attention=self.attention,
            )
            x = x + attention(nn.RMSNorm()(x))
            hidden = nn.gelu(nn.Dense(4 * self.width)(nn.RMSNorm()(x)))
            x = x + nn.Dense(self.width)(hidden)
        return nn.Dense(self.vocabulary)(nn.RMSNorm()(x))


def loss(model, tokens, params):
    """Returns the mean cross-entropy, in nats, of tokens [B, T] after the first."""
    logits = model.apply(params, tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def hessian_product(loss, params, vector):
    """Returns the Hessian of loss(params) times `vector`, a tree like `params`."""
    return jax.jvp(jax.grad(loss), (params,), (vector,))[1]


def lanczos(product, start, iterations: int):
    """Approximates the extreme eigenvalues of a symmetric matrix.

    Args:
        product: function that multiplies a vector [n] by the matrix.
        start: a random vector [n].
        iterations: number of products; at most n.

    Returns:
        Ritz values [iterations] in ascending order, and how far each is at most from an eigenvalue.
        The outer ones converge first.
    """

    def step(carry, i):
        basis, vector = carry
        basis = basis.at[i].set(vector)
        found = product(vector)
        diagonal = jnp.vdot(vector, found, precision="highest")
        # Against all vectors: rounding would bring back those that have converged, and with them
        # copies of their eigenvalues. What the first pass leaves by rounding, the second removes.
        for _ in range(2):
            shares = jnp.matmul(basis, found, precision="highest")
            found = found - jnp.matmul(shares, basis, precision="highest")
        size = jnp.linalg.norm(found)
        return (basis, found / size), (diagonal, size)

    empty = jnp.zeros((iterations, start.size), start.dtype)
    first = start / jnp.linalg.norm(start)
    _, entries = jax.lax.scan(step, (empty, first), jnp.arange(iterations))
    diagonal, sizes = entries
    inner = jnp.diag(sizes[:-1], 1)
    values, vectors = jnp.linalg.eigh(jnp.diag(diagonal) + inner + inner.T)
    return values, jnp.abs(sizes[-1] * vectors[-1])


def spectrum(loss, params, iterations: int, seed: int = 0):
    """Returns the Ritz values of the Hessian of loss(params), and their bounds."""
    flat, unravel = ravel_pytree(params)
    along = lambda vector: ravel_pytree(hessian_product(loss, params, unravel(vector)))[0]
    return lanczos(along, jax.random.normal(jax.random.key(seed), flat.shape, flat.dtype), iterations)


def windows(length: int):
    """Returns the bytes of this file in rows, int32 [rows, length]."""
    text = np.frombuffer(pathlib.Path(__file__).read_bytes(), np.uint8).astype(np.int32)
    return jnp.asarray(text[: text.size // length * length].reshape(-1, length))


def main():
    """Prints the extreme eigenvalues before and after training on this file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sizes = {"layers": 2, "width": 32, "length": 64, "iterations": 30, "steps": 100}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default, help="default %(default)s")
    flags = parser.parse_args()
    tokens = windows(flags.length)
    model = LanguageModel(128, flags.layers, flags.width)
    params = jax.jit(model.init)(jax.random.key(0), tokens)
    objective, optimizer = functools.partial(loss, model, tokens), optax.adam(3e-3)
    state = optimizer.init(params)

    @jax.jit
    def step(params, state):
        updates, state = optimizer.update(jax.grad(objective)(params), state)
        return optax.apply_updates(params, updates), state

    extremes = jax.jit(functools.partial(spectrum, objective, iterations=flags.iterations))

    def report(taken):
        values, bounds = extremes(params)
        ends = " to ".join(f"{values[i]:.3f} +- {bounds[i]:.3f}" for i in (0, -1))
        print(f"step {taken}: loss {objective(params):.3f} nats, eigenvalues {ends};")
        print(f"  gradient descent diverges with steps beyond {2 / values[-1]:.4f}")

    print(f"{sum(x.size for x in jax.tree.leaves(params)):,} parameters")
    report(0)
    for _ in range(flags.steps):
        params, state = step(params, state)
    report(flags.steps)


if __name__ == "__main__":
    main()
