"""Exact causal attention and its gradients, on any device.

Run: python examples/quickstart.py
"""

import jax
import jax.numpy as jnp

from flash_pallas import explain, flash_attention

q = jax.random.normal(jax.random.key(0), (2, 512, 8, 64), jnp.bfloat16)  # batch, length, heads, dim
k, v = jax.random.normal(jax.random.key(1), (2, 2, 512, 2, 64), jnp.bfloat16)  # grouped: 2 KV heads
loss = lambda q, k, v: jnp.sum(flash_attention(q, k, v, causal=True).astype(jnp.float32) ** 2)
value, grads = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(q, k, v)
print("loss", value, "gradients", [g.shape for g in grads])
print(explain(flash_attention, q, k, v, causal=True))
