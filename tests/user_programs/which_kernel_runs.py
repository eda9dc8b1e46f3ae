"""A program in the manner of docs/which-kernel-runs.md."""

from typing import assert_type, get_args

import jax

import flash_pallas
from flash_pallas import (
    Explanation,
    Tuning,
    UnsupportedByBackend,
    autotune,
    explain,
    flash_attention,
    flash_decode,
    target,
)
from flash_pallas.nn.linen import FlashAttention
from flash_pallas.typing import BackendName


def first(x: jax.Array, *names: BackendName) -> jax.Array:
    for name in names:
        try:
            return flash_attention(x, x, x, backend=name, blocks={"block_q": 64, "block_kv": 256})
        except UnsupportedByBackend as error:
            print(name, error)
    return flash_attention(x, x, x)


def every(x: jax.Array) -> list[jax.Array]:
    assert_type(autotune(x, x, x), Tuning)
    return [first(x, "hopper", "portable"), *(first(x, name) for name in get_args(BackendName))]


def asked(x: jax.Array, shape: jax.ShapeDtypeStruct) -> None:
    with target("H200"):
        found = explain(flash_attention, x, x, x, causal=True)
    assert_type(found, Explanation)
    print(found.backend, found.blocks, found.calls[0].reasons["xla"])
    explain(flash_attention, shape, shape, shape, bias=shape, causal=True)
    explain(flash_decode, x, x, x, kv_lengths=3)
    explain(first, x, "hopper")
    explain(jax.grad(lambda x: flash_attention(x, x, x).sum()), x)
    explain(FlashAttention(num_heads=4), x)
    explain(flash_pallas.compat.torch_sdpa.scaled_dot_product_attention, x, x, x)


def wrong(x: jax.Array) -> None:
    explain(flash_attention, x, x, x, backend="tpu")  # error
    explain(flash_attention, x, x, x, causal="yes")  # error
    explain(flash_decode, x, x, num_splits="two")  # error
    explain(x, x, x)  # error
    flash_pallas.explain_decode(x, x, x)  # error
    print(flash_pallas.nm)  # error
    first(x, "hopper", "gpu")  # error
    flash_attention(x, x, x, blocks=64)  # error
    flash_attention(x, x, x, backend=None)  # error
    autotune(x, x, x, backend="cuda")  # error
