"""A program in the manner of docs/which-kernel-runs.md."""

from typing import assert_type, get_args

import jax

from flash_pallas import Tuning, UnsupportedByBackend, autotune, flash_attention
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


def wrong(x: jax.Array) -> None:
    first(x, "hopper", "gpu")  # error
    flash_attention(x, x, x, blocks=64)  # error
    flash_attention(x, x, x, backend=None)  # error
    autotune(x, x, x, backend="cuda")  # error
