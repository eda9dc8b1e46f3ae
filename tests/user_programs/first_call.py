"""A program in the manner of docs/first-call.md."""

import jax
import jax.numpy as jnp

import flash_pallas
from flash_pallas import flash_attention


@jax.jit
def gradients(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
    loss = lambda *qkv: flash_attention(*qkv, causal=True).astype(jnp.float32).sum()
    return jax.grad(loss, argnums=(0, 1, 2))(q, k, v)


def ahead(gpu: str) -> jax.export.Exported:
    x = jax.ShapeDtypeStruct((2, 128, 4, 64), jnp.bfloat16)
    with flash_pallas.target(gpu):
        return jax.export.export(gradients, platforms=["cpu", "cuda"])(x, x, x)


def moved(x: jax.Array) -> jax.Array:
    return flash_attention(x, x, x, causal=True, q_offset=jnp.array(3, jnp.int32))


def wrong(x: jax.Array, shape: jax.ShapeDtypeStruct) -> None:
    flash_attention(shape, shape, shape)  # error
    flash_attention(x, x, x, scale=x)  # error
    flash_pallas.target(90)  # error
    flash_pallas.target()  # error
