"""Meta-learns a transformer for regression by MAML, whose gradient passes through a gradient.

    python examples/maml.py
    python examples/maml.py --first-order

A task is a sine wave. MAML (https://arxiv.org/abs/1703.03400) takes one gradient step on points of
the task and differentiates the loss on other points of it, after the step, with respect to the
parameters before: (I - rate * Hessian) times a gradient, which is reverse mode over reverse mode.
The first-order variant leaves the Hessian out.

The model is one of in-context learning (https://arxiv.org/abs/2208.01066): it predicts every point
from the points before it, which causal attention shows to it.
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


class Regressor(nn.Module):
    """A causal transformer that predicts y of every point from x and the points before it."""

    layers: int = 2
    width: int = 32
    attention: Callable = flash_attention

    @nn.compact
    def __call__(self, x, y):
        """Returns predictions [B, T] of y [B, T] at x [B, T]; the i-th depends on y[:, :i] only."""
        before = lambda values: jnp.pad(values[:, :-1], ((0, 0), (1, 0)))
        h = nn.Dense(self.width)(jnp.stack([x, before(x), before(y)], axis=-1))
        for _ in range(self.layers):
            options = {"causal": True, "differentiable": "any", "attention": self.attention}
            h = h + FlashAttention(2, **options)(nn.LayerNorm()(h))
            mlp = nn.Sequential([nn.Dense(4 * self.width), nn.gelu, nn.Dense(self.width)])
            h = h + mlp(nn.LayerNorm()(h))
        return nn.Dense(1)(nn.LayerNorm()(h))[..., 0]


def loss(model, params, points):
    """Returns the mean squared error of predictions of points (x, y), each [B, T]."""
    x, y = points
    return jnp.mean((model.apply(params, x, y) - y) ** 2)


def adapt(loss, params, support, rate: float, first_order: bool = False):
    """Returns the parameters after one gradient step on the points of `support`."""
    grads = jax.grad(loss)(params, support)
    if first_order:
        grads = jax.lax.stop_gradient(grads)
    return jax.tree.map(lambda param, grad: param - rate * grad, params, grads)


def meta_loss(loss, params, tasks, rate: float, first_order: bool = False):
    """Returns the mean loss on the queries of tasks, each after a step on its support.

    Args:
        loss: function (params, points) of one task.
        params: parameters before the step.
        tasks: (support, query), trees of points with a leading axis of tasks.
        rate: size of the step.
        first_order: take the inner gradient for a constant.
    """

    def of_task(support, query):
        return loss(adapt(loss, params, support, rate, first_order), query)

    return jnp.mean(jax.vmap(of_task)(*tasks))


def sines(key, tasks: int, prompts: int, points: int):
    """Draws support and query of sine waves: each is (x, y), both [tasks, prompts, points]."""
    keys = jax.random.split(key, 3)
    draw = functools.partial(jax.random.uniform, shape=(tasks, 1, 1))
    height = draw(keys[0], minval=0.5, maxval=2.0)
    phase = draw(keys[1], maxval=2 * math.pi)
    x = jax.random.uniform(keys[2], (2, tasks, prompts, points), minval=-3.0, maxval=3.0)
    y = height[None] * jnp.sin(x + phase[None])
    return (x[0], y[0]), (x[1], y[1])


def main():
    """Trains, and prints the loss on new tasks with and without the step."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in {"steps": 300, "tasks": 16, "prompts": 2, "points": 16}.items():
        parser.add_argument(f"--{name}", type=int, default=default, help="default %(default)s")
    parser.add_argument("--rate", type=float, default=0.1, help="of the inner step")
    parser.add_argument("--first-order", action="store_true")
    flags = parser.parse_args()
    key = jax.random.key(0)
    draw = functools.partial(sines, tasks=flags.tasks, prompts=flags.prompts, points=flags.points)
    model, optimizer = Regressor(), optax.adam(2e-3)
    new = draw(key)
    params = jax.jit(model.init)(key, *jax.tree.map(lambda x: x[0], new[0]))
    state = optimizer.init(params)
    objective = functools.partial(meta_loss, functools.partial(loss, model))

    @jax.jit
    def step(params, state, key):
        grads = jax.grad(objective)(params, draw(key), flags.rate, flags.first_order)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(params, updates), state

    evaluate = jax.jit(objective)
    for i in range(1, flags.steps + 1):
        params, state = step(params, state, jax.random.fold_in(key, i))
        if i % max(1, flags.steps // 10) == 0:
            without, adapted = (evaluate(params, new, rate) for rate in (0.0, flags.rate))
            print(f"step {i}: loss {without:.4f}, after the inner step {adapted:.4f}")


if __name__ == "__main__":
    main()
