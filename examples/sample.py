"""Generates text with a trained model."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax


def generate(graph, params, prompt: bytes, count: int, window: int, key, temperature=0.8) -> bytes:
    """Continues prompt by `count` bytes, each from the last `window` bytes, recomputed each time.

    Args:
        graph: graph of the model, from nnx.split.
        params: parameters of the model, from nnx.split.
        prompt: at least one byte.
        count: number of bytes to add.
        window: number of bytes that the model sees at once.
        key: a jax.random key.
        temperature: below 1 favours likely bytes.

    Returns:
        prompt and its continuation.
    """
    size = max(len(prompt) + count, window)
    text = np.zeros(size, np.int32)
    text[: len(prompt)] = np.frombuffer(prompt, np.uint8)
    text = _extend(graph, params, text, len(prompt), count, window, key, temperature)
    return np.asarray(text[: len(prompt) + count]).astype(np.uint8).tobytes()


@functools.partial(jax.jit, static_argnames=("graph", "window"))
def _extend(graph, params, text, length, count, window, key, temperature):
    model = nnx.merge(graph, params)

    def add(index, text):
        # What lies beyond `index` is not written yet; the model is causal and does not see it.
        start = jnp.maximum(index - window, 0)
        logits = model(lax.dynamic_slice(text, (start,), (window,))[None])[0, index - 1 - start]
        byte = jax.random.categorical(jax.random.fold_in(key, index), logits / temperature)
        return text.at[index].set(byte.astype(text.dtype))

    return lax.fori_loop(length, length + count, add, text)
