"""Trains a small diffusion transformer by MeanFlow and draws samples in one step.

    python examples/mean_flow.py

MeanFlow (https://arxiv.org/abs/2505.13447) learns u(z, r, t), the mean velocity of a flow between
the times r and t. Its target contains the derivative of u along the flow, so a training step is
forward mode inside reverse mode: `jax.jvp` of the network in `jax.grad` of the loss.

The toy data are circles, a token for every point. Tokens must agree about center and radius, which
they can only do by attention.
"""

import argparse
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from flash_pallas import flash_attention
from flash_pallas.nn.linen import FlashAttention


class Block(nn.Module):
    """Attention and an MLP, scaled, shifted and gated by a condition [B, D] (adaLN-zero)."""

    attention: Callable
    heads: int

    @nn.compact
    def __call__(self, x, condition):
        """Applies the block to x [B, T, D]."""
        width, norm = x.shape[-1], nn.LayerNorm(use_bias=False, use_scale=False)
        # Gates of 0: a block begins as the identity, as in DiT (https://arxiv.org/abs/2212.09748).
        modulate = nn.Dense(6 * width, kernel_init=nn.initializers.zeros)
        changes = jnp.split(modulate(nn.silu(condition))[:, None], 6, axis=-1)
        attend = FlashAttention(self.heads, differentiable="any", attention=self.attention)
        mlp = nn.Sequential([nn.Dense(4 * width), nn.gelu, nn.Dense(width)])
        for layer, (shift, scale, gate) in ((attend, changes[:3]), (mlp, changes[3:])):
            x = x + gate * layer(norm(x) * (1 + scale) + shift)
        return x


class MeanVelocity(nn.Module):
    """The mean velocity u(z, r, t) of points between the times r and t."""

    layers: int = 2
    width: int = 64
    heads: int = 2
    attention: Callable = flash_attention

    @nn.compact
    def __call__(self, z, r, t):
        """Returns u [B, T, C] of z [B, T, C] and times r and t [B]."""
        # Low frequencies: the loss differentiates by t, and high ones made the samples worse.
        frequencies = jnp.geomspace(1.0, 5.0, self.width // 2, dtype=t.dtype)
        angles = jnp.stack([t, t - r], axis=1)[:, :, None] * frequencies[None, None]
        waves = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=1)
        condition = nn.Dense(self.width)(waves.reshape(t.shape[0], -1))
        place = self.param("place", nn.initializers.normal(0.5), (1, z.shape[1], self.width))
        x = nn.Dense(self.width)(z) + place
        for _ in range(self.layers):
            x = Block(self.attention, self.heads)(x, condition)
        return nn.Dense(z.shape[-1])(nn.LayerNorm()(x))


def mean_flow_loss(velocity, params, x, noise, times):
    """Computes the loss of u = velocity(params, z, r, t), and the mean squared error in it.

    Data x and noise are [B, T, C], times are (r, t), both [B], and r is at most t.
    """
    r, t = times
    wide = lambda time: time[:, None, None]
    z, v = (1 - wide(t)) * x + wide(t) * noise, noise - x
    along = v, jnp.zeros_like(r), jnp.ones_like(t)
    u, du = jax.jvp(functools.partial(velocity, params), (z, r, t), along)
    target = jax.lax.stop_gradient(v - wide(t - r) * du)
    squares = jnp.mean((u - target) ** 2, axis=(1, 2))
    # Targets with a large derivative are noisy. The weights give all samples the same influence.
    weights = jax.lax.stop_gradient(1 / (squares + 1e-3))
    return jnp.mean(weights * squares), jnp.mean(squares)


def draw(key, batch: int, points: int):
    """Draws circles [batch, points, 2], noise of that shape, and times r <= t [batch]."""
    keys = jax.random.split(key, 5)
    center = jax.random.normal(keys[0], (batch, 1, 2))
    radius = jax.random.uniform(keys[1], (batch, 1, 1), minval=0.5, maxval=1.5)
    angles = jnp.linspace(0.0, 2 * math.pi, points, endpoint=False)
    circles = center + radius * jnp.stack([jnp.cos(angles), jnp.sin(angles)], axis=-1)[None]
    pair = jax.nn.sigmoid(jax.random.normal(keys[2], (2, batch)) - 0.4)
    r, t = pair.min(axis=0), pair.max(axis=0)
    # For three quarters of the samples r = t, which is plain flow matching, as in the paper.
    r = jnp.where(jax.random.bernoulli(keys[3], 0.75, (batch,)), t, r)
    return circles, jax.random.normal(keys[4], circles.shape), (r, t)


def roughness(points):
    """Returns the mean deviation of points [B, T, 2] from circles around their centers."""
    radii = jnp.linalg.norm(points - points.mean(axis=1, keepdims=True), axis=-1)
    return float(jnp.mean(jnp.std(radii, axis=1)))


def main():
    """Trains, and prints how far samples drawn in one step are from circles."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in {"steps": 1000, "batch": 64, "points": 16}.items():
        parser.add_argument(f"--{name}", type=int, default=default, help="default %(default)s")
    flags = parser.parse_args()
    model = MeanVelocity()
    optimizer = optax.adam(optax.cosine_decay_schedule(2e-3, flags.steps))
    _, noise, _ = draw(jax.random.key(0), flags.batch, flags.points)
    whole = noise, jnp.zeros(flags.batch), jnp.ones(flags.batch)  # all the way, from t=1 to r=0
    params = jax.jit(model.init)(jax.random.key(1), *whole)
    state, loss = optimizer.init(params), functools.partial(mean_flow_loss, model.apply)

    @jax.jit
    def step(params, state, key):
        batch = draw(key, flags.batch, flags.points)
        (_, error), grads = jax.value_and_grad(loss, has_aux=True)(params, *batch)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(params, updates), state, error

    for i, key in enumerate(jax.random.split(jax.random.key(2), flags.steps), 1):
        params, state, error = step(params, state, key)
        if i % max(1, flags.steps // 10) == 0:
            print(f"step {i}: squared error {error:.4f}")
    samples = noise - model.apply(params, *whole)
    print(f"deviation from circles: noise {roughness(noise):.3f}, samples {roughness(samples):.3f}")


if __name__ == "__main__":
    main()
