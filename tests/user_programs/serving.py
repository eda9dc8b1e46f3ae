"""A program in the manner of docs/serving.md."""

from typing import assert_type

import jax
import numpy as np

from flash_pallas import append_ragged_kv, ragged_paged_attention
from flash_pallas.compat import ragged_paged_attention as tpu

Pages = tuple[jax.Array, jax.Array]


def step(
    pages: Pages, x: jax.Array, table: np.ndarray, lengths: np.ndarray, rows: np.ndarray
) -> tuple[jax.Array, Pages]:
    o, pages = ragged_paged_attention(
        x,
        *pages,
        kv_lengths=lengths,
        page_table=table,
        cu_q_lens=rows,
        num_seqs=np.int32(2),
        new_k=x,
        new_v=x,
        window=(1023, 0),
        num_splits="auto",
    )
    assert_type(o, jax.Array)
    return o, pages


def read(pages: Pages, x: jax.Array, n: jax.Array) -> jax.Array:
    k, v = append_ragged_kv(pages, x, x, kv_lengths=n, page_table=n, cu_q_lens=n)
    assert_type(v, jax.Array)
    o = ragged_paged_attention(x, k, v, kv_lengths=n, page_table=n, cu_q_lens=n)
    assert_type(o, jax.Array)
    pair = ragged_paged_attention(x, k, v, kv_lengths=n, page_table=n, cu_q_lens=n, return_lse=True)
    assert_type(pair, tuple[jax.Array, jax.Array])
    return o + pair[0]


def latent(k: jax.Array, x: jax.Array, n: jax.Array) -> jax.Array:
    k, none = append_ragged_kv((k, None), x, kv_lengths=n, page_table=n, cu_q_lens=n)
    assert_type(none, None)
    o, (k, none) = ragged_paged_attention(
        x, k, None, kv_lengths=n, page_table=n, cu_q_lens=n, new_k=x, v_head_dim=128
    )
    return o + k.sum()


def of_tpu(x: jax.Array, pages: jax.Array, n: jax.Array) -> jax.Array:
    return tpu.ragged_paged_attention(x, pages, n, n, n, n, sm_scale=0.125, sliding_window=16)


def wrong(x: jax.Array, n: jax.Array) -> None:
    ragged_paged_attention(x, x, x, kv_lengths=n, page_table=n)  # error
    ragged_paged_attention(x, x, x, kv_lengths=n, page_table=n, cu_q_lens=n, new_v=x)  # error
    ragged_paged_attention(x, x, x, kv_lengths=n, page_table=n, cu_q_lens=n, backend="")  # error
    append_ragged_kv((x, x), x, x, page_table=n, cu_q_lens=n)  # error
    append_ragged_kv(x, x, x, kv_lengths=n, page_table=n, cu_q_lens=n)  # error
    tpu.ragged_paged_attention(x, x, n, n, n, n, sliding_window="16")  # error
