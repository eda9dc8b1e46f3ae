"""A program in the manner of docs/switching.md."""

from typing import assert_type

import jax
from flax import linen as nn

from flash_pallas import dot_product_attention
from flash_pallas.integrations import gemma, keras, levanter, maxtext, transformers
from flash_pallas.integrations.equinox import to_flash
from flash_pallas.nn import attention_fn, causal_attention_fn


class Model(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.MultiHeadDotProductAttention(num_heads=4, attention_fn=causal_attention_fn)(x)
        return nn.MultiHeadDotProductAttention(num_heads=4, attention_fn=attention_fn)(x)


def attend(x: jax.Array, lengths: jax.Array) -> jax.Array:
    o = dot_product_attention(x, x, x, None, None, key_value_seq_lengths=lengths)
    o += dot_product_attention(x, x, x, bias=x, local_window_size=(31, 0), implementation="xla")
    assert_type(attention_fn(x, x, x, dropout_rate=0.1, dropout_rng=x), jax.Array)
    return o


def clients(model: Model) -> Model:
    gemma.install()
    maxtext.install()
    with keras.installed(), levanter.installed(), transformers.installed("gpt2", "llama"):
        pass
    return to_flash(model, causal=True, window=(31, 0))


def wrong(x: jax.Array, model: Model) -> None:
    dot_product_attention(x, x, x, None, None, 0.1)  # error
    dot_product_attention(x, x, x, implementation="triton")  # error
    attention_fn(x, x, x, module=x)  # error
    attention_fn(x, x, x, einsum_dot_general=max)  # error
    to_flash(model, causal="yes")  # error
    to_flash(model, window="31")  # error
    transformers.install(["gpt2"])  # error
