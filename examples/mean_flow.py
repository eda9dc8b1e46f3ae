"""Trains a small diffusion transformer by MeanFlow and draws samples in one step.

    python examples/mean_flow.py

MeanFlow (https://arxiv.org/abs/2505.13447) learns u(z, r, t), the mean velocity of a flow between
the times r and t. Its target contains the derivative of u along the flow, so the training step is
forward mode inside of reverse mode: `jax.jvp` of the network in `jax.grad` of the loss. That is what
`differentiable="any"` is for.

The toy data are circles: the tokens of a sample are points at fixed angles, center and radius are
random. Tokens must agree about both, which they can only do by attention.
"""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from flash_pallas import flash_attention


class Block(nn.Module):
    """Attention and an MLP, scaled, shifted and gated by a condition [B, D] (adaLN-zero)."""

    heads: int
    attention: Callable

    @nn.compact
    def __call__(self, x, condition):
        """Applies the block to x [B, T, D]."""
        width = x.shape[-1]
        # A block begins as the identity, as in DiT (https://arxiv.org/abs/2212.09748).
        zero = nn.initializers.zeros
        changes = nn.Dense(6 * width, kernel_init=zero)(nn.silu(condition))[:, None]
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = jnp.split(changes, 6, axis=-1)
        norm = nn.LayerNorm(use_bias=False, use_scale=False)
        y = norm(x) * (1 + scale) + shift
        qkv = nn.DenseGeneral((3, self.heads, width // self.heads))(y)
        o = self.attention(*jnp.unstack(qkv, axis=2))
        x = x + gate * nn.DenseGeneral(width, axis=(-2, -1))(o)
        y = norm(x) * (1 + mlp_scale) + mlp_shift
        return x + mlp_gate * nn.Dense(width)(nn.gelu(nn.Dense(4 * width)(y)))


class MeanVelocity(nn.Module):
    """The mean velocity u(z, r, t) of points between the times r and t."""

    layers: int = 2
    width: int = 64
    heads: int = 2
    attention: Callable = functools.partial(flash_attention, differentiable="any")

    @nn.compact
    def __call__(self, z, r, t):
        """Returns u [B, T, C] of z [B, T, C] and times r and t [B]."""
        frequencies = jnp.exp(jnp.linspace(0.0, math.log(20.0), self.width // 2, dtype=t.dtype))
        angles = jnp.stack([t, t - r], axis=1)[:, :, None] * frequencies[None, None]
        waves = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=1)
        condition = nn.Dense(self.width)(waves.reshape(t.shape[0], -1))
        place = self.param("place", nn.initializers.normal(0.5), (1, z.shape[1], self.width))
        x = nn.Dense(self.width)(z) + place
        for _ in range(self.layers):
            x = Block(self.heads, self.attention)(x, condition)
        return nn.Dense(z.shape[-1])(nn.LayerNorm()(x))


def loss(velocity, params, x, noise, times):
    """Computes the loss of MeanFlow, and the mean squared error that it weights.

    Args:
        velocity: function (params, z, r, t) -> u.
        params: parameters, by which the loss is differentiated.
        x: data [B, T, C].
        noise: normal noise [B, T, C].
        times: (r, t), each [B]; r is at most t.
    """
    r, t = times
    spread = lambda time: time[:, None, None]
    z, v = (1 - spread(t)) * x + spread(t) * noise, noise - x
    along = v, jnp.zeros_like(r), jnp.ones_like(t)
    u, du = jax.jvp(functools.partial(velocity, params), (z, r, t), along)
    target = jax.lax.stop_gradient(v - spread(t - r) * du)
    squares = jnp.mean((u - target) ** 2, axis=(1, 2))
    # Targets with a large derivative are noisy: each sample has a weight that bounds its part.
    weights = jax.lax.stop_gradient(1 / (squares + 1e-3))
    return jnp.mean(weights * squares), jnp.mean(squares)


def circles(key, batch: int, points: int):
    """Draws circles with random centers and radii, [batch, points, 2]."""
    keys = jax.random.split(key)
    center = jax.random.normal(keys[0], (batch, 1, 2))
    radius = jax.random.uniform(keys[1], (batch, 1, 1), minval=0.5, maxval=1.5)
    angles = jnp.linspace(0.0, 2 * math.pi, points, endpoint=False)
    return center + radius * jnp.stack([jnp.cos(angles), jnp.sin(angles)], axis=-1)[None]


def draw_times(key, batch: int):
    """Draws r and t, each [batch]; in three quarters of the samples they are equal, as in the paper."""
    keys = jax.random.split(key)
    pair = jax.nn.sigmoid(jax.random.normal(keys[0], (2, batch)) - 0.4)
    r, t = pair.min(axis=0), pair.max(axis=0)
    return jnp.where(jax.random.bernoulli(keys[1], 0.75, (batch,)), t, r), t


def roughness(points):
    """Returns the mean deviation of points [B, T, 2] from circles around their centers."""
    radii = jnp.linalg.norm(points - points.mean(axis=1, keepdims=True), axis=-1)
    return float(jnp.mean(jnp.std(radii, axis=1)))


def main():
    """Trains, and prints how far samples drawn in one step are from circles."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in {"steps": 1000, "batch": 64, "points": 16}.items():
        parser.add_argument(f"--{name}", type=int, default=default, help="default %(default)s")
    flags = parser.parse_args()
    key = jax.random.key(0)
    noise = jax.random.normal(key, (flags.batch, flags.points, 2))
    zeros, ones = jnp.zeros(flags.batch), jnp.ones(flags.batch)
    model, optimizer = MeanVelocity(), optax.adam(2e-3)
    params = jax.jit(model.init)(key, noise, zeros, ones)
    state = optimizer.init(params)

    @jax.jit
    def step(params, state, key):
        keys = jax.random.split(key, 3)
        x, fresh = circles(keys[0], *noise.shape[:2]), jax.random.normal(keys[1], noise.shape)
        of = functools.partial(loss, model.apply)
        (_, error), grads = jax.value_and_grad(of, has_aux=True)(
            params, x, fresh, draw_times(keys[2], flags.batch)
        )
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(params, updates), state, error

    for i in range(flags.steps):
        params, state, error = step(params, state, jax.random.fold_in(key, i))
        if i % max(1, flags.steps // 10) == 0 or i == flags.steps - 1:
            print(f"step {i + 1}: squared error {error:.4f}")
    samples = noise - model.apply(params, noise, zeros, ones)
    print(f"deviation from circles: noise {roughness(noise):.3f}, samples {roughness(samples):.3f}")


if __name__ == "__main__":
    main()
