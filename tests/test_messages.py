"""Wrong calls of every door: their errors name the argument, the value and the way out."""

from __future__ import annotations

import inspect
import logging
import math
import traceback
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flash_pallas as fp
from flash_pallas.compat import flash_attn, flex, ragged_paged_attention, splash, torch_sdpa
from flash_pallas.frontend import dispatch
from flash_pallas.frontend.words import Words

B, T, S, N, K, H = 2, 5, 9, 4, 2, 8
Q, KEYS = jnp.ones((B, T, N, H)), jnp.ones((B, S, K, H))
TABLE, IDS = jnp.zeros((T, S)), np.arange(S)
attend = lambda q=Q, k=KEYS, v=KEYS, **options: fp.flash_attention(q, k, v, **options)
scored = lambda mod: attend(score_mod=mod)
masked = lambda mod: attend(mask_mod=mod)
decode = lambda q=Q[:, :1], k=KEYS, v=KEYS, **options: fp.flash_decode(q, k, v, **options)

# The call; what its message has, of which the bars are no part.
FUNCTIONS = {
    "a list": (lambda: attend([1.0]), "q must be an array|list|jnp.array(q)"),
    "lengths in a list": (lambda: attend(kv_lengths=[3, 4]), "kv_lengths|jnp.array([3, 4])"),
    "an offset in a list": (lambda: attend(q_offset=[1, 2]), "q_offset|jnp.array([1, 2])"),
    "ids in a long list": (
        lambda: attend(q_segment_ids=[0] * 99, kv_segment_ids=[0] * 99),
        "q_segment_ids|list|jnp.array(...)",
    ),
    "slopes of integers": (
        lambda: attend(alibi_slopes=jnp.ones(N, int)),
        "alibi_slopes|int32|astype(jnp.float32)",
    ),
    "a window of text": (
        lambda: attend(window="all"),
        "window is 'all'|an int|(left, right)|None|integer array|unbounded|(128, 0)",
    ),
    "a window of three": (lambda: attend(window=(1, 2, 3)), "window is (1, 2, 3)|(left, right)"),
    "a mask of keys": (
        lambda: attend(mask=jnp.ones((B, S), bool)),
        "mask has shape (2, 9)|mask[:, None, None, :]",
    ),
    "a mask of numbers": (lambda: attend(mask=TABLE), "mask has dtype float32|mask.astype(bool)"),
    "a backend": (lambda: attend(backend="tpu"), "backend is 'tpu'|'portable'|'xla'"),
    "another name": (lambda: attend(is_causal=True), "'is_causal'|did you mean 'causal'"),
    "too many by position": (
        lambda: fp.flash_attention(Q, KEYS, KEYS, True),
        "3 arguments by position|q, k, v|got 4|by name",
    ),
    "a causal step": (lambda: attend(Q[:, :1], causal=True), "q_offset=8|q_offset=0"),
    "dropout": (lambda: attend(dropout_rate=0.5), "dropout_seed is None|jax.random.key(0)"),
    "a mask as a block mask": (
        lambda: attend(block_mask=jnp.ones((T, S), bool)),
        "block_mask|from_dense",
    ),
    "causal decoding": (lambda: decode(causal=True), "'causal'|always causal: leave it out"),
    "decoding at once": (lambda: decode(Q[:, 0]), "rank 4|q (2, 4, 8)|q[:, None]"),
    "a page table in a list": (lambda: decode(page_table=[[0]]), "page_table|jnp.array([[0]])"),
    "splits": (lambda: decode(num_splits=0), "num_splits is 0|1 to 128|'auto'"),
    "cumulative lengths in a list": (
        lambda: fp.flash_attention_varlen(Q[0], Q[0], Q[0], cu_seqlens_q=[0, 5]),
        "cu_seqlens_q|jnp.array([0, 5])",
    ),
    "heads of pages": (
        lambda: ragged(fp.ragged_paged_attention, k_pages=PAGES, v_pages=PAGES, q=Q[:, 0, :3]),
        "q has 3 heads and k_pages 2|multiple",
    ),
    "lengths of a cache": (
        lambda: fp.KVCache.empty(B, -1, K, H, jnp.float32),
        "length is -1|batch, length, kv_heads, head_dim",
    ),
    "new lengths in a list": (
        lambda: fp.append_kv(fp.KVCache.empty(B, S, K, H, "float32"), KEYS, KEYS, new_lengths=[1]),
        "new_lengths|list|jnp.array(...)",
    ),
    "a block mask of a list": (
        lambda: fp.BlockMask.from_dense([[True]]),
        "mask must be an array of bool|list|jnp.array(mask, bool)",
    ),
}
MODS = {
    "too few": (
        lambda: scored(lambda s, i, j: s),
        "score_mod takes (s, i, j)|(score, b, n, i, j)|lambda score, b, n, i, j: ...",
    ),
    "too many": (
        lambda: masked(lambda s, b, n, i, j: i >= j),
        "mask_mod takes (s, b, n, i, j)|mask_mod(b, n, i, j)|lambda b, n, i, j: ...",
    ),
    "if": (lambda: scored(lambda s, b, n, i, j: s if i > j else -s), "`if`|jnp.where(condition"),
    "and": (lambda: masked(lambda b, n, i, j: i >= j and j > 2), "`and`|&"),
    "not": (lambda: masked(lambda b, n, i, j: not i < j), "`not`|~"),
    "a chain": (lambda: masked(lambda b, n, i, j: 0 < j <= i), "a < b < c|(a < b) & (b < c)"),
    "max": (lambda: scored(lambda s, b, n, i, j: max(s, 0.0)), "max|jnp.maximum"),
    "numpy": (lambda: scored(lambda s, b, n, i, j: np.tanh(s)), "jnp.tanh|np.tanh"),
    "an array of numpy": (
        lambda: masked(lambda b, n, i, j: IDS[i] == IDS[j]),
        "numpy array|jnp.asarray(array)",
    ),
    "math": (lambda: scored(lambda s, b, n, i, j: math.exp(s)), "math.exp|jnp.exp"),
    "a list": (lambda: scored(lambda s, b, n, i, j: s + [1.0, 2.0][n]), "list[i]|jnp.array(list)"),
    "select": (
        lambda: scored(lambda s, b, n, i, j: jnp.select([i > j, i == j], [s, 2 * s], -1.0)),
        "jnp.select|nest jnp.where|jnp.where(a, x, jnp.where(b, y, z))",
    ),
    "piecewise": (
        lambda: scored(lambda s, b, n, i, j: jnp.piecewise(s, [s > 0, s <= 0], [jnp.sin, jnp.cos])),
        "jnp.where|jnp.piecewise",
    ),
    "both positions": (
        lambda: scored(lambda s, b, n, i, j: s + TABLE[i, j]),
        "indexes an array|by b and n|bias=",
    ),
    "both positions of a mask": (
        lambda: masked(lambda b, n, i, j: TABLE[i, j] > 0),
        "indexes an array|by b and i|by b and j|mask=",
    ),
    "a head and a position": (
        lambda: masked(lambda b, n, i, j: TABLE.astype(int)[n, j] > 0),
        "by n together with i or j|mask=",
    ),
    "nothing": (lambda: scored(lambda s, b, n, i, j: None), "score_mod|one float|`return`"),
    "a bool": (lambda: scored(lambda s, b, n, i, j: i > j), "one float|bool[]|as mask_mod"),
    "a number": (lambda: masked(lambda b, n, i, j: i - j), "one bool|int32[]|j <= i|score_mod"),
    "of a block mask": (
        lambda: fp.BlockMask.from_mask_mod(lambda b, n, i, j: i >= j and j > 2, 1, 1, T, S),
        "mask_mod|`and`|&",
    ),
}

FIRST = jnp.ones((B, N, T, H))  # heads first, as in PyTorch
sdpa = lambda q=FIRST, k=FIRST, v=FIRST, *more, **options: torch_sdpa.scaled_dot_product_attention(
    q, k, v, *more, **options
)
flexed = lambda q=FIRST, k=FIRST, v=FIRST, *more, **options: flex.flex_attention(
    q, k, v, *more, **options
)
created = lambda mod, b=None, q_len=T: flex.create_block_mask(mod, b, None, q_len, T)
LAYOUT = "[*batch, heads, length, head_dim]"
TORCH = {
    "a list": (lambda: sdpa([1.0]), "query must be an array|jnp.array(query)"),
    "dtypes": (lambda: sdpa(k=FIRST.astype("bfloat16")), "query, key and value|key bfloat16"),
    "integers": (lambda: sdpa(FIRST.astype(int)), "query has dtype int32|query.astype("),
    "lengths": (lambda: sdpa(v=FIRST[:, :, :3]), f"key and value|value (2, 4, 3, 8)|{LAYOUT}"),
    "head dims": (lambda: sdpa(k=FIRST[..., :4]), f"query and key|head_dim|(2, 4, 5, 4)|{LAYOUT}"),
    "batches": (lambda: sdpa(FIRST[:1]), f"query (1, 4, 5, 8)|broadcast_to|{LAYOUT}"),
    "ranks": (lambda: sdpa(FIRST[0]), f"same rank|query (4, 5, 8)|{LAYOUT}"),
    "heads": (
        lambda: sdpa(k=FIRST[:, :1], v=FIRST[:, :1]),
        f"query has 4 heads and key 1|enable_gqa=True|{LAYOUT}",
    ),
    "a mask of keys": (
        lambda: sdpa(FIRST, FIRST, FIRST, jnp.ones((B, T), bool)),
        "attn_mask has shape (2, 5)|(2, 4, 5, 5)|attn_mask[:, None, None, :]",
    ),
    "a mask of integers": (
        lambda: sdpa(FIRST, FIRST, FIRST, jnp.ones((T, T), int)),
        "attn_mask has dtype int32|bool|attn_mask.astype(bool)",
    ),
    "a mask in a list": (lambda: sdpa(FIRST, FIRST, FIRST, [[1]]), "attn_mask|list|jnp.array(...)"),
    "dropout": (lambda: sdpa(dropout_p=0.5), "dropout_p is 0.5|dropout_seed"),
    "too much dropout": (lambda: sdpa(dropout_p=1.5), "dropout_p is 1.5|[0, 1)"),
    "a flag": (lambda: sdpa(is_causal=1), "is_causal must be a bool|1"),
    "our name": (lambda: sdpa(mask=None), "'mask'|did you mean 'attn_mask'"),
    "flex, a rank": (lambda: flexed(*[FIRST[0]] * 3), "query has shape (4, 5, 8)|[batch, heads,"),
    "flex, a function": (
        lambda: flexed(block_mask=lambda b, h, i, j: i >= j),
        "block_mask|create_block_mask",
    ),
    "flex, arity": (lambda: flexed(score_mod=lambda s, i, j: s), "(score, b, h, q_idx, kv_idx)"),
    "flex, both positions": (
        lambda: flexed(score_mod=lambda s, b, h, i, j: s + TABLE[i, j]),
        "q_idx or kv_idx|by b and h|block_mask",
    ),
    "flex, a mask of both": (
        lambda: created(lambda b, h, i, j: TABLE[i, j] > 0),
        "q_idx or kv_idx|by b and q_idx|dense=True",
    ),
    "flex, and": (lambda: created(lambda b, h, i, j: i >= j and j > 2), "`and`|&"),
    "flex, a size": (lambda: created(flex.noop_mask, "all"), "B is 'all'|None for any"),
    "flex, a length": (lambda: created(flex.noop_mask, None, 2.5), "Q_LEN is 2.5|positive int"),
    "flex, masks in a list": (
        lambda: flex.and_masks([flex.noop_mask]),
        "mask_mods[0]|and_masks(*masks)",
    ),
}

PAGES, ROWS = jnp.ones((5, 16, K, H)), jnp.ones((S, K, H))
CACHE = jnp.zeros((B, 32, K, H))
kv_cached = lambda q=Q[:, :1], k=CACHE, v=CACHE, *more, **options: (
    flash_attn.flash_attn_with_kvcache(q, k, v, *more, **options)
)
packed = lambda k=ROWS, cu=(0, 4, S), **options: flash_attn.flash_attn_varlen_func(
    jnp.ones((T, N, H)), k, k, jnp.array([0, 2, T]), jnp.array(cu), **options
)
dao = lambda q=Q, **options: flash_attn.flash_attn_func(q, KEYS, KEYS, **options)


def ragged(function, **given):
    names = {"kv_lengths": "kv_lens", "page_table": "page_indices"}
    places = {
        "kv_lengths": jnp.array([20, 7]),
        "page_table": jnp.array([[4, 1], [2, 0]]),
        "cu_q_lens": jnp.array([0, 1, 2]),
    }
    if function is not fp.ragged_paged_attention:
        places = {names.get(name, name): x for name, x in places.items()}
        places["num_seqs"] = jnp.array([2])
    return function(**{"q": jnp.ones((2, N, H)), **places, **given})


tpu = partial(ragged, ragged_paged_attention.ragged_paged_attention)
PAIRS = jnp.ones((5, 16, 2 * K, H))
whole = splash.MultiHeadMask([splash.CausalMask((T, T))] * N)
splashed = lambda q=FIRST[0], k=FIRST[0], v=FIRST[0], *more, **options: splash.make_splash_mha(
    whole, **options
)(q, k, v, *more)
OTHERS = {
    "a rank": (lambda: dao(Q[0]), "q has shape (5, 4, 8)|[batch, length, heads, head_dim]"),
    "a window": (lambda: dao(window_size=5), "window_size is 5|(left, right)|-1"),
    "a window of floats": (lambda: dao(window_size=(0.5, 1)), "window_size is (0.5, 1)|ints|-1"),
    "a softcap": (lambda: dao(softcap=-1.0), "softcap|-1.0|0.0 is no cap"),
    "a scale": (lambda: dao(softmax_scale="x"), "softmax_scale|'x'"),
    "dropout": (lambda: dao(dropout_p=0.1), "dropout_p is 0.1|dropout_seed"),
    "weights": (lambda: dao(return_attn_probs=True), "return_attn_probs|flash_attention_with_lse"),
    "our name": (lambda: dao(window=3), "'window'|did you mean 'window_size'"),
    "packed integers": (
        lambda: flash_attn.flash_attn_qkvpacked_func(jnp.ones((B, T, 3, N, H), int)),
        "qkv has dtype int32|qkv.astype(",
    ),
    "packed, not cumulative": (lambda: packed(cu=(1, 4, 5)), "cu_seqlens_k is [1 4 5]|sum"),
    "pages of no rank": (lambda: packed(block_table=jnp.zeros((2, 1), int)), "k has shape|pages"),
    "pages without room": (
        lambda: packed(PAGES, (0, 17, 18), block_table=jnp.zeros((2, 1), int)),
        "cu_seqlens_k|17 keys|block_table|16|columns",
    ),
    "a cache of a rank": (lambda: kv_cached(k=CACHE[0]), "k_cache has shape (32, 2, 8)|pages"),
    "a cache of a dtype": (lambda: kv_cached(Q[:, :1].astype("float16")), "k_cache float32"),
    "a full cache": (
        lambda: kv_cached(Q, CACHE, CACHE, KEYS, KEYS, cache_seqlens=32),
        "32 tokens|cache_seqlens|k_cache and v_cache more rows",
    ),
    "lengths in a list": (
        lambda: kv_cached(cache_seqlens=[1, 2]),
        "cache_seqlens|jnp.array([1, 2])",
    ),
    "splits": (lambda: kv_cached(cache_seqlens=3, num_splits=500), "num_splits is 500|or 0"),
    "pages of a cache": (
        lambda: kv_cached(k=PAGES, v=PAGES, cache_seqlens=3, block_table=jnp.zeros((1, 2), int)),
        "block_table has shape (1, 2)|2 sequences",
    ),
    "pages of pairs": (lambda: tpu(kv_pages=PAIRS[:, :, :3]), "kv_pages|(5, 16, 3, 8)|2 * heads"),
    "pages of a size": (
        lambda: tpu(kv_pages=PAIRS[:, :5]),
        "kv_pages has pages of 5|multiple of 16",
    ),
    "lengths of pages": (
        lambda: tpu(kv_pages=PAIRS, kv_lens=jnp.array([200, 7])),
        "kv_lens[0] is 200|0 to 32|jnp.clip(kv_lens",
    ),
    "a table of pages": (
        lambda: tpu(kv_pages=PAIRS, page_indices=jnp.array([4, 1])),
        "page_indices has shape (2,)|kv_lens",
    ),
    "a scale of pages": (lambda: tpu(kv_pages=PAIRS, sm_scale="x"), "sm_scale|'x'"),
    "a cap of pages": (lambda: tpu(kv_pages=PAIRS, soft_cap=-1.0), "soft_cap|-1.0"),
    "queries of a batch": (lambda: tpu(q=Q, kv_pages=PAIRS), "q has shape (2, 5, 4, 8)|[tokens,"),
    "splash of a batch": (
        lambda: splashed(FIRST, FIRST, FIRST),
        "[heads, queries,|jax.vmap(kernel)",
    ),
    "splash, values": (lambda: splashed(v=FIRST[0, :, :3]), "k and v|v (4, 3, 8)"),
    "splash, ids": (
        lambda: splashed(*[FIRST[0]] * 3, jnp.zeros(T, int)),
        "segment_ids|SegmentIds(q=ids, kv=ids)",
    ),
    "splash, ids of a length": (
        lambda: splashed(*[FIRST[0]] * 3, splash.SegmentIds(jnp.zeros(3, int), jnp.zeros(T, int))),
        "segment_ids.q has shape (3,)|(5,)",
    ),
    "splash, a cap": (lambda: splashed(attn_logits_soft_cap=-1.0), "attn_logits_soft_cap|-1.0"),
    "splash, a window": (lambda: splash.LocalMask((T, T), 5), "window_size is 5|(left, right)"),
    "splash, a shape": (lambda: splash.CausalMask(T), "shape is 5|number of queries"),
}

jax_nn = lambda q=Q, k=KEYS, v=KEYS, **options: fp.dot_product_attention(q, k, v, **options)
JAX_NN = {
    "a list": (lambda: jax_nn([1.0]), "query must be an array|jnp.array(query)"),
    "heads": (lambda: jax_nn(Q[:, :, :3]), "query has 3 heads and key 2"),
    "ranks": (lambda: jax_nn(Q[0]), "query, key and value|query (5, 4, 8)|key[None]"),
    "a mask of keys": (
        lambda: jax_nn(mask=jnp.ones((B, S), bool)),
        "mask has shape (2, 9)|mask[:, None, None, :]",
    ),
    "lengths": (
        lambda: jax_nn(key_value_seq_lengths=jnp.ones(3, int)),
        "key_value_seq_lengths has shape (3,)|(2,)",
    ),
    "lengths in a list": (lambda: jax_nn(query_seq_lengths=[1, 2]), "query_seq_lengths|jnp.array("),
    "a window": (lambda: jax_nn(local_window_size="all"), "local_window_size is 'all'|(128, 0)"),
    "an implementation": (lambda: jax_nn(implementation="tpu"), "implementation is 'tpu'|'xla'"),
    "a flag": (lambda: jax_nn(is_causal=None), "is_causal must be a bool|None"),
}


def layer(kind="nnx", **fields):
    """Returns a function of a layer's inputs."""
    if kind == "nnx":
        nnx = pytest.importorskip("flax.nnx")
        from flash_pallas.nn.nnx import FlashAttention

        return FlashAttention(N, 16, rngs=nnx.Rngs(0), **fields)
    pytest.importorskip("flax.linen")
    from flash_pallas.nn.linen import FlashAttention as Linen

    return lambda *x, **given: Linen(N, **fields).init_with_output(jax.random.key(0), *x, **given)


def flax_function(*arrays, **options):
    from flash_pallas.nn import attention_fn

    return attention_fn(*arrays, **options)


X, Y = jnp.ones((B, T, 16)), jnp.ones((B, S, 16))
cache = lambda batch=B: fp.KVCache.empty(batch, 16, N, 4, jnp.float32)
LAYERS = {
    "a list": (lambda m: m()([1.0]), "inputs must be an array|jnp.array(inputs)"),
    "a rank": (lambda m: m()(X[0, 0]), "inputs has shape (16,)|[*batch, length, features]|x[None]"),
    "batches": (lambda m: m()(X, Y[:1]), "inputs has shape|inputs_kv (1, 9, 16)|broadcast_to"),
    "ids": (
        lambda m: m()(X, segment_ids=jnp.zeros((B, 4), int)),
        "segment_ids has shape (2, 4)|(2, 5)",
    ),
    "ids in a list": (lambda m: m()(X, segment_ids=[0]), "segment_ids|jnp.array([0])"),
    "lengths": (lambda m: m()(X, lengths=jnp.ones(3, int)), "lengths has shape (3,)|(2,)"),
    "a mask of keys": (
        lambda m: m()(X, mask=jnp.ones((B, T))),
        "mask has shape (2, 5)|mask[:, None, None, :]",
    ),
    "a causal step": (
        lambda m: m(causal=True)(X[:, :1], Y),
        "inputs has one token|inputs_kv 9|cache=|causal=False",
    ),
    "a cache of another batch": (
        lambda m: m(causal=True)(X, cache=cache(3)),
        "inputs has 2 sequences|cache.lengths|batch=2",
    ),
    "slopes": (lambda m: m(alibi="yes")(X), "alibi is 'yes'|bool|4 heads"),
    "a base": (lambda m: m(rope_theta="x")(X), "rope_theta is 'x'|10000.0|None"),
    "no head dim": (lambda m: m(head_dim=0)(X), "head_dim is 0|positive|None"),
    "an attention": (lambda m: m(attention="flash")(X), "attention is 'flash'|function|backend="),
    "a context": (lambda m: m(context_parallel="x")(X), "context_parallel is 'x'|ContextParallel("),
    "a flag": (lambda m: m(deterministic_backward=1)(X), "deterministic_backward must be a bool|1"),
}
FLAX = {
    "features": (lambda: layer()(jnp.ones((B, T, 3))), "inputs has shape (2, 5, 3)|16 features"),
    "features of keys": (
        lambda: layer()(X, Y[..., :3]),
        "inputs_kv has shape (2, 9, 3)|16 features",
    ),
    "a ring": (
        lambda: fp.nn.RingCache.empty(B, (7, 0), N, 8, jnp.float32),
        "window is (7, 0)|int|8 for a layer",
    ),
    "a function's list": (lambda: flax_function([1.0], Q, Q), "query must be an array|jnp.array("),
    "a function's heads": (lambda: flax_function(Q[:, :, :3], KEYS, KEYS), "query has 3|key 2"),
    "a function's mask": (
        lambda: flax_function(Q, Q, Q, mask=jnp.ones((B, T))),
        "mask has shape (2, 5)|mask[:, None, None, :]",
    ),
    "a function's key": (
        lambda: flax_function(Q, Q, Q, dropout_rate=0.5, dropout_rng="x"),
        "dropout_rng|'x'|key",
    ),
}
GROUPS = {
    "functions": FUNCTIONS, "mods": MODS, "torch": TORCH, "others": OTHERS, "jax.nn": JAX_NN,
    "flax": FLAX,
    **dict.fromkeys(("nnx", "linen"), LAYERS),
}  # fmt: skip
CALLS = {f"{group}: {name}": x for group, cases in GROUPS.items() for name, x in cases.items()}


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_call_says_what_is_wrong_and_what_to_do(name):
    call, told = CALLS[name]
    if inspect.signature(call).parameters:
        call = partial(call, partial(layer, name.split(":")[0]))
    with pytest.raises((TypeError, ValueError, NotImplementedError)) as found:
        call()
    message = str(found.value)
    for words in told.split("|"):
        assert words in message, f"{words!r} is not in: {message}"
    assert "Traced<" not in message and "jaxlib" not in message


def test_the_line_of_a_mod_is_shown():
    def mod(score, b, n, i, j):
        return score if i > j else -score

    with pytest.raises(ValueError, match="`if`") as found:
        scored(mod)
    line = inspect.getsourcelines(mod)[1] + 1
    frames = traceback.extract_tb(found.value.__cause__.__traceback__)
    assert (__file__, line) in [(frame.filename, frame.lineno) for frame in frames]


def test_words_are_those_of_the_caller_and_errors_of_others_stay():
    words = Words({"q": "query", "mask": "attn_mask", "kv_lengths": "lengths"})
    assert (
        words.said("q (2,), mask[0] is a mask of q")
        == "query (2,), attn_mask[0] is a mask of query"
    )
    assert words.said("q_offset, kv_lengths[1], new_q, x.q") == "q_offset, lengths[1], new_q, x.q"
    for value in ("'q'", '"q"', "['q', 'mask']", "<function q at 0x7f>"):
        assert words.said(f"q's mask is {value}: pass q") == (
            f"query's attn_mask is {value}: pass query"
        )

    def mod(score, b, n, i, j):
        raise ValueError("q is mine")

    with pytest.raises(ValueError, match=r"^q is mine\b"):
        flexed(score_mod=mod)

    # Those of what the user's function calls have the names of that.
    def attention(q, k, v, **options):
        return fp.flash_attention(q, k, v, q_lengths=jnp.ones(3))

    with pytest.raises(TypeError, match=r"^q_lengths has dtype"):
        layer(attention=attention)(jnp.ones((1, 4, 16)))

    # The folder of another package, whose name begins like ours.
    theirs = compile("raise ValueError('q')", f"{Path(fp.__file__).parent}_of/x.py", "exec")
    with pytest.raises(ValueError, match=r"^q$"), words:
        exec(theirs)


CAUSAL = {"causal": True}
PLACED = {
    "an offset": {"q_offset": 0},
    "positions": {"q_positions": jnp.zeros((B, T), int)},
    "lengths": {"kv_lengths": 3},
    "ids": {"q_segment_ids": jnp.zeros((B, T), int), "kv_segment_ids": jnp.zeros((B, S), int)},
    "no causal mask": {"causal": False},
}


@pytest.fixture
def logged(caplog):
    """Messages at WARNING, of which there are none yet."""
    dispatch._log_once.cache_clear()
    with caplog.at_level(logging.WARNING, "flash_pallas"):
        yield lambda: [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize(
    "call",
    [
        lambda: attend(causal=True),
        lambda: attend(window=(3, 0)),
        lambda: fp.flash_attention_with_lse(Q, KEYS, KEYS, causal=True),
        lambda: fp.flash_attention_with_max_logit(Q, KEYS, KEYS, causal=True),
    ],
)
def test_several_causal_queries_of_more_keys_are_warned_of_once(call, logged):
    call(), call()
    (message,) = logged()
    assert all(x in message for x in ("q has 5", "k 9", "position 0", "q_offset=4", "q_offset=0"))


@pytest.mark.parametrize("name", PLACED)
def test_queries_whose_place_is_said_are_not_warned_of(name, logged):
    attend(**CAUSAL | PLACED[name])
    attend(KEYS, causal=True)
    assert logged() == []


@pytest.mark.parametrize(
    "call",
    [
        lambda: jax_nn(is_causal=True),
        lambda: dao(causal=True),
        lambda: sdpa(FIRST[:, :, :3], is_causal=True),
        lambda: layer(causal=True)(X, Y),
        lambda: layer("linen", causal=True)(X, Y),
        lambda: fp.explain(fp.flash_attention, Q, KEYS, KEYS, causal=True),
    ],
    ids=["jax.nn", "flash-attn", "torch", "nnx", "linen", "explain"],
)
def test_doors_with_a_rule_of_their_own_are_not_warned_of(call, logged):
    call()
    assert logged() == []
