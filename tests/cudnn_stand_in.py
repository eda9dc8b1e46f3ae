"""A stand-in for cuDNN behind jax.nn on a CPU: its rules, and no more than it promises.

It refuses what jax.nn and cuDNN refuse, and leaves NaN wherever nothing says what cuDNN writes: in
outputs and gradients beyond a length, and in queries that see no key. Arithmetic is in float32.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from flash_pallas.backends.cudnn.backend import LOWEST


def dot_product_attention(
    query,
    key,
    value,
    bias=None,
    mask=None,
    *,
    scale,
    is_causal,
    local_window_size,
    query_seq_lengths,
    key_value_seq_lengths,
    implementation,
    return_residual=False,
):
    """Computes what `jax.nn.dot_product_attention(implementation="cudnn")` does."""
    assert implementation == "cudnn" and type(scale) is float and scale > 0.0
    (batch, q_len, heads, head_dim), kv_len = query.shape, key.shape[1]
    assert key.shape == value.shape and not q_len % 2 and not kv_len % 2 and not head_dim % 8
    if mask is not None:
        assert bias is None and mask.shape[0] in (1, batch) and mask.shape[1] in (1, heads)
        bias = jnp.where(mask, 0.0, LOWEST[query.dtype]).astype(query.dtype)
    elif bias is not None:
        assert bias.dtype == query.dtype and bias.shape[0] in (1, batch) and bias.shape[1] == heads
    assert bias is None or bias.shape[2:] == (q_len, kv_len)
    lengths = []
    for given, most in ((query_seq_lengths, q_len), (key_value_seq_lengths, kv_len)):
        full = jnp.full(batch, most, jnp.int32)
        lengths.append(full if given is None else given)
    padded = query_seq_lengths is not None or key_value_seq_lengths is not None
    assert not padded or bias is None
    window = None
    if local_window_size is not None:
        left, right = local_window_size
        # Without is_causal, the right end of the window would be forgotten.
        assert is_causal and right == 0 and left >= 0 and not padded and q_len <= kv_len
        window = left + 1
    o, lse = _attend((scale, is_causal, window), query, key, value, bias, *lengths)
    return (o, jnp.swapaxes(lse, 1, 2).astype(o.dtype)) if return_residual else o


def _beyond(lengths, size: int):
    return jnp.arange(size)[None] >= lengths[:, None]


def _exact(options, q, k, v, bias, q_lengths, kv_lengths):
    """Computes (o, lse [B, N, T]) in float32 from float32; a query without a key gives NaN."""
    scale, causal, window = options
    (_, q_len, heads, _), kv_len = q.shape, k.shape[1]
    k, v = (jnp.repeat(x, heads // x.shape[2], axis=2) for x in (k, v))
    s = scale * jnp.einsum("btnh,bsnh->bnts", q, k, precision="highest")
    s = s if bias is None else s + bias
    row, column = np.arange(q_len)[None, None, :, None], np.arange(kv_len)[None, None, None]
    keep = ~_beyond(kv_lengths, kv_len)[:, None, None]
    if causal:
        keep &= column <= row
    if window is not None:
        keep &= column > row - window
    s = jnp.where(keep, s, -jnp.inf)
    lse = jax.nn.logsumexp(s, axis=-1)
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(s), v, precision="highest"), lse


def _marked(x, beyond):
    return jnp.where(beyond[:, :, None, None], jnp.nan, x)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(options, q, k, v, bias, q_lengths, kv_lengths):
    return _attend_fwd(options, q, k, v, bias, q_lengths, kv_lengths)[0]


def _attend_fwd(options, *given):
    (q, *_), q_lengths = given, given[4]
    wide = [None if x is None else x.astype(jnp.float32) for x in given[:4]]
    o, lse = _exact(options, *wide, *given[4:])
    return (_marked(o, _beyond(q_lengths, q.shape[1])).astype(q.dtype), lse), given


def _attend_bwd(options, given, cotangents):
    q, k, v, bias, q_lengths, kv_lengths = given
    queries, keys = _beyond(q_lengths, q.shape[1]), _beyond(kv_lengths, k.shape[1])
    do = jnp.where(queries[:, :, None, None], 0.0, cotangents[0].astype(jnp.float32))
    wide = [x.astype(jnp.float32) for x in (q, k, v)]
    added = None if bias is None else bias.astype(jnp.float32)
    run = lambda q, k, v, bias: _exact(options, q, k, v, bias, q_lengths, kv_lengths)[0]
    dq, dk, dv, dbias = jax.vjp(run, *wide, added)[1](do)
    found = _marked(dq, queries), _marked(dk, keys), _marked(dv, keys)
    grads = [d.astype(x.dtype) for d, x in zip(found, (q, k, v), strict=True)]
    return *grads, None if bias is None else dbias.astype(bias.dtype), None, None


_attend.defvjp(_attend_fwd, _attend_bwd)
