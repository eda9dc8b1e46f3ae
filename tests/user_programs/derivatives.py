"""A program in the manner of docs/derivatives.md."""

import jax

from flash_pallas import flash_attention
from flash_pallas.typing import Differentiable


def energy(x: jax.Array, differentiable: Differentiable = "any") -> jax.Array:
    return flash_attention(x, x, x, differentiable=differentiable).sum()


def product(x: jax.Array, direction: jax.Array) -> jax.Array:
    return jax.jvp(jax.grad(energy), (x,), (direction,))[1]


def wrong(x: jax.Array) -> None:
    flash_attention(x, x, x, differentiable="fwd")  # error
    flash_attention(x, x, x, differentiable=2)  # error
    energy(x, "forward")  # error
