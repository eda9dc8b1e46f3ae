"""Finds the extreme eigenvalues of the Hessian of a language model's loss, by Lanczos.

    python examples/hessian.py

The Hessian is never formed. Its product with a vector is forward mode over reverse mode, the
tangent of the gradient along the vector, and costs a few gradients. Lanczos needs nothing else
(https://arxiv.org/abs/1901.10159). The largest eigenvalue, the sharpness, limits the step size of
gradient descent: beyond 2 / sharpness it is unstable (https://arxiv.org/abs/2103.00065).
"""

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
    """A causal transformer over tokens."""

    vocabulary: int
    layers: int
    width: int
    attention: Callable = flash_attention

    @nn.compact
    def __call__(self, tokens):
        """Returns the logits [B, T, vocabulary] of the tokens after tokens [B, T]."""
        options = {"causal": True, "rope_theta": 10_000.0, "attention": self.attention}
        x = nn.Embed(self.vocabulary, self.width)(tokens)
        for _ in range(self.layers):
            attend = FlashAttention(2, differentiable="any", **options)
            x = x + attend(nn.RMSNorm()(x))
            mlp = nn.Sequential([nn.Dense(4 * self.width), nn.gelu, nn.Dense(self.width)])
            x = x + mlp(nn.RMSNorm()(x))
        return nn.Dense(self.vocabulary)(nn.RMSNorm()(x))


def cross_entropy(model, tokens, params):
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
        Ritz values [iterations] in ascending order, of which the outer ones converge first, and
        bounds of their distances from the nearest eigenvalue.
    """

    def step(carry, i):
        basis, vector = carry
        basis = basis.at[i].set(vector)
        found = product(vector)
        diagonal = jnp.vdot(vector, found, precision="highest")
        # Full reorthogonalisation: without it, rounding brings converged vectors back, and copies
        # of their eigenvalues. Twice, as the first pass leaves rounding errors of its own.
        for _ in range(2):
            shares = jnp.matmul(basis, found, precision="highest")
            found = found - jnp.matmul(shares, basis, precision="highest")
        size = jnp.linalg.norm(found)
        return (basis, found / size), (diagonal, size)

    empty = jnp.zeros((iterations, start.size), start.dtype)
    first = start / jnp.linalg.norm(start)
    _, (diagonal, sizes) = jax.lax.scan(step, (empty, first), jnp.arange(iterations))
    inner = jnp.diag(sizes[:-1], 1)
    values, vectors = jnp.linalg.eigh(jnp.diag(diagonal) + inner + inner.T)
    return values, jnp.abs(sizes[-1] * vectors[-1])


def spectrum(loss, params, iterations: int):
    """Returns Ritz values of the Hessian of loss(params), and their bounds, as `lanczos` does."""
    flat, unravel = ravel_pytree(params)
    product = lambda vector: ravel_pytree(hessian_product(loss, params, unravel(vector)))[0]
    start = jax.random.normal(jax.random.key(0), flat.shape, flat.dtype)
    return lanczos(product, start, iterations)


def main():
    """Prints the extreme eigenvalues before and after training on the bytes of this file."""
    parser = argparse.ArgumentParser(description=__doc__)
    sizes = {"layers": 2, "width": 32, "length": 64, "iterations": 30, "steps": 100}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default, help="default %(default)s")
    flags = parser.parse_args()
    text = np.frombuffer(pathlib.Path(__file__).read_bytes(), np.uint8).astype(np.int32)
    tokens = text[: text.size // flags.length * flags.length].reshape(-1, flags.length)
    model, optimizer = LanguageModel(128, flags.layers, flags.width), optax.adam(3e-3)
    params = jax.jit(model.init)(jax.random.key(0), tokens)
    state, loss = optimizer.init(params), functools.partial(cross_entropy, model, tokens)
    find = jax.jit(functools.partial(spectrum, loss, iterations=flags.iterations))

    @jax.jit
    def step(params, state):
        updates, state = optimizer.update(jax.grad(loss)(params), state)
        return optax.apply_updates(params, updates), state

    for i in range(flags.steps + 1):
        if i in (0, flags.steps):
            values, bounds = find(params)
            ends = " to ".join(f"{values[j]:.3f} +- {bounds[j]:.3f}" for j in (0, -1))
            print(f"step {i}: loss {loss(params):.3f} nats, eigenvalues {ends}")
            print(f"  gradient descent is unstable with steps beyond {2 / values[-1]:.4f}")
        params, state = step(params, state)


if __name__ == "__main__":
    main()
