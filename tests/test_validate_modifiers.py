"""Every bad mask or modifier: its type of error and what the message must say."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flash_pallas as fp

Q, K = jnp.ones((2, 8, 4, 16)), jnp.ones((2, 10, 2, 16))
FULL = (2, 4, 8, 10)
IDS, KV_IDS = jnp.zeros((2, 8), jnp.int32), jnp.zeros((2, 10), jnp.int32)
TABLE = jnp.ones((8, 10))
NAN, INF = float("nan"), float("inf")

BAD = {
    "mask float": ({"mask": jnp.ones(FULL)}, TypeError, r"float32.*bool \(True is visible\).*bias"),
    "mask int": ({"mask": jnp.ones(FULL, jnp.int8)}, TypeError, r"int8.*mask\.astype\(bool\)"),
    "mask list": ({"mask": [[True]]}, TypeError, "mask must be an array .*got list"),
    "mask rank": (
        {"mask": jnp.ones((8, 10), bool)},
        ValueError,
        r"\(8, 10\).*\(2, 4, 8, 10\).*mask\[None, None, :, :\] if it is \[q_length, kv_length\]$",
    ),
    "mask of padding": (
        {"mask": jnp.ones((2, 10), bool)},
        ValueError,
        r"\(2, 10\).*as in mask\[:, None, None, :\] if it is \[batch, kv_length\]$",
    ),
    "bias of heads": (
        {"bias": jnp.ones((4, 8, 10))},
        ValueError,
        r"as in bias\[None, :, :, :\] if it is \[heads, q_length, kv_length\]$",
    ),
    "mask rank 5": ({"mask": jnp.ones((1, *FULL), bool)}, ValueError, r"mask.*\(1, 2, 4, 8, 10\)"),
    "mask length": (
        {"mask": jnp.ones((2, 4, 8, 9), bool)},
        ValueError,
        r"\(2, 4, 8, 9\).*\(2, 4, 8, 10\) or 1",
    ),
    "mask of key heads": (
        {"mask": jnp.ones((2, 2, 8, 10), bool)},
        ValueError,
        "heads are those of q: repeat each 2 times",
    ),
    "bias int": ({"bias": jnp.ones(FULL, jnp.int32)}, TypeError, "int32.*float; use mask"),
    "bias bool": ({"bias": jnp.ones(FULL, bool)}, TypeError, "bool.*use mask for booleans"),
    "bias shape": ({"bias": jnp.ones((2, 4, 1, 11))}, ValueError, r"bias.*\(2, 4, 1, 11\).*or 1"),
    "bias batch": ({"bias": jnp.ones((3, 4, 8, 10))}, ValueError, r"bias.*\(3, 4, 8, 10\)"),
    "bias str": ({"bias": "alibi"}, TypeError, "bias must be an array .*got str"),
    "window negative": ({"window": -3}, ValueError, "-3: its entries must be at least 0"),
    "window -1, -1": ({"window": (-1, -1)}, ValueError, "use None for unbounded"),
    "window of three": ({"window": (1, 2, 3)}, ValueError, r"an int, \(left, right\)"),
    "window float": ({"window": 2.0}, TypeError, r"window is 2\.0: it must be an int, .*array"),
    "window str": ({"window": "3"}, TypeError, "window is .*must be an int"),
    "window bool": ({"window": True}, TypeError, "window is .*must be an int"),
    "window array": (
        {"window": np.array([1, 0, 2])},
        ValueError,
        "window has shape.*a scalar for all",
    ),
    "window of floats": ({"window": jnp.array(2.0)}, TypeError, "window has dtype float32"),
    "window array negative": ({"window": jnp.array(-2)}, ValueError, "None for unbounded"),
    "positions twice": (
        {"q_offset": 3, "q_positions": np.zeros((2, 5), int)},
        ValueError,
        "q_positions is given too",
    ),
    "empty_rows": ({"empty_rows": "nan"}, ValueError, "choose 'zero', or 'mean'"),
    "softcap 0": ({"softcap": 0.0}, ValueError, "finite and positive, got 0.*None is no cap"),
    "softcap negative": ({"softcap": -2.0}, ValueError, "finite and positive, got -2"),
    "softcap inf": ({"softcap": INF}, ValueError, "softcap must be finite, got inf"),
    "softcap nan": ({"softcap": NAN}, ValueError, "softcap must be finite, got nan"),
    "softcap huge": (
        {"softcap": 1e38},
        ValueError,
        r"softcap is 1e\+38: it must be in \[1e-06, 1e\+30\].*None is no cap",
    ),
    "softcap beyond float32": ({"softcap": 1e300}, ValueError, r"softcap is 1e\+300"),
    "softcap tiny": ({"softcap": 1e-40}, ValueError, "softcap is 1e-40"),
    "scale huge": ({"scale": -1e300}, ValueError, r"scale is -1e\+300.*at most 1e\+30"),
    "softcap str": ({"softcap": "30"}, TypeError, "softcap must be a Python number"),
    "one side's ids": (
        {"q_segment_ids": IDS},
        ValueError,
        "kv_segment_ids is None.*must be given together",
    ),
    "the other's": ({"kv_segment_ids": KV_IDS}, ValueError, "q_segment_ids is None.*together"),
    "ids float": (
        {"q_segment_ids": IDS.astype(jnp.float32), "kv_segment_ids": KV_IDS},
        TypeError,
        r"q_segment_ids has dtype float32.*astype\(jnp\.int32\)",
    ),
    "ids shape": (
        {"q_segment_ids": IDS, "kv_segment_ids": IDS},
        ValueError,
        r"kv_segment_ids has shape \(2, 8\).*\[\*batch, length\], \(2, 10\)",
    ),
    "ids without batch": (
        {"q_segment_ids": IDS[0], "kv_segment_ids": KV_IDS[0]},
        ValueError,
        r"q_segment_ids has shape \(8,\).*\(2, 8\)",
    ),
    "lengths float": (
        {"kv_lengths": jnp.ones(2)},
        TypeError,
        r"kv_lengths has dtype float32.*kv_lengths\.astype\(jnp\.int32\)",
    ),
    "lengths shape": (
        {"q_lengths": jnp.ones(3, jnp.int32)},
        ValueError,
        r"q_lengths has shape \(3,\).*one per batch entry, \(2,\), or a scalar",
    ),
    "lengths bool": ({"q_lengths": True}, TypeError, "q_lengths must be an int32 array"),
    "lengths list": ({"kv_lengths": [3, 4]}, TypeError, "kv_lengths must be an array .*got list"),
    "slopes int": ({"alibi_slopes": jnp.ones(4, jnp.int32)}, TypeError, "alibi_slopes.*a float"),
    "slopes shape": (
        {"alibi_slopes": jnp.ones(2)},
        ValueError,
        r"alibi_slopes has shape \(2,\).*one per query head, \(4,\).*\(2, 4\)",
    ),
    "slopes float": ({"alibi_slopes": 0.5}, TypeError, "alibi_slopes must be an array"),
    "sinks bool": ({"sinks": jnp.ones(4, bool)}, TypeError, "sinks has dtype bool.*a float"),
    "sinks shape": ({"sinks": jnp.ones((4, 1))}, ValueError, r"sinks has shape \(4, 1\).*\(4,\)"),
    "rate 1": (
        {"dropout_rate": 1.0, "dropout_seed": 0},
        ValueError,
        r"dropout_rate is 1\.0.*\[0, 1\)",
    ),
    "rate negative": ({"dropout_rate": -0.1, "dropout_seed": 0}, ValueError, r"-0\.1.*\[0, 1\)"),
    "rate nan": ({"dropout_rate": NAN, "dropout_seed": 0}, ValueError, r"nan.*\[0, 1\)"),
    "rate str": ({"dropout_rate": "0.1"}, TypeError, "dropout_rate must be a Python number"),
    "no seed": (
        {"dropout_rate": 0.1},
        ValueError,
        r"dropout_seed is None: pass a key.*jax\.random\.key",
    ),
    "seed float": (
        {"dropout_rate": 0.1, "dropout_seed": jnp.ones(2)},
        TypeError,
        r"dropout_seed has dtype float32.*integer or a key of jax\.random",
    ),
    "seed str": ({"dropout_rate": 0.1, "dropout_seed": "0"}, TypeError, "an int, an integer array"),
    "seed bool": ({"dropout_rate": 0.1, "dropout_seed": True}, TypeError, "dropout_seed must be"),
    "seed of 65 bits": (
        {"dropout_rate": 0.1, "dropout_seed": 2**64},
        ValueError,
        "dropout_seed is 18446744073709551616: it must fit 64 bits",
    ),
    "no seeds": (
        {"dropout_rate": 0.1, "dropout_seed": jnp.zeros(0, jnp.uint32)},
        ValueError,
        r"dropout_seed has shape \(0,\) and no number in it",
    ),
    "broadcast_dropout": (
        {"broadcast_dropout": None},
        TypeError,
        "broadcast_dropout must be a bool, got None",
    ),
    "mod": ({"score_mod": 2.0}, TypeError, r"score_mod must be a function, got 2\.0"),
    "mod's result": (
        {"score_mod": lambda s, b, n, i, j: i < j},
        TypeError,
        "score_mod must return one float",
    ),
    "mask_mod's result": (
        {"mask_mod": lambda b, n, i, j: i - j},
        TypeError,
        "mask_mod must return one bool",
    ),
    "mod indexes by position": (
        {"score_mod": lambda s, b, n, i, j: s + TABLE[i, j]},
        ValueError,
        "score_mod cannot be traced into a kernel.*bias=",
    ),
    "mod takes a whole array": (
        {"mask_mod": lambda b, n, i, j: jnp.any(IDS[0] > i + j)},
        ValueError,
        "mask_mod cannot be traced into a kernel.*indexed by b and n.*mask=",
    ),
    "mod of too few arguments": (
        {"mask_mod": lambda i, j: i < j},
        TypeError,
        r"mask_mod takes \(i, j\) and is called as mask_mod\(b, n, i, j\)",
    ),
}


FUNCTIONS = {
    "attention": fp.flash_attention,
    "with lse": fp.flash_attention_with_lse,
    "explain": functools.partial(fp.explain, fp.flash_attention),
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_bad_modifiers(case, function):
    keywords, error, message = BAD[case]
    # By lines: JAX adds a note of its own to what is raised while it traces.
    with pytest.raises(error, match=f"(?m){message}"):
        function(Q, K, K, **keywords)


@pytest.mark.parametrize(
    ("name", "value"),
    [("softcap", 2.0), ("dropout_rate", 0.5), ("deterministic", 1)],
)
def test_traced_values_that_must_be_static(name, value):
    call = jax.jit(lambda x: fp.flash_attention(Q, K, K, **{name: x}, dropout_seed=0))
    with pytest.raises(TypeError, match=rf"{name} is .*static.*static_argnames"):
        call(value)


def test_one_program_for_local_and_global_layers():
    q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 8, 4, 16))
    layer = jax.jit(lambda window: fp.flash_attention(q, k, v, causal=True, window=(window, 0)))
    for window in (3, 3, 0, 8, 3, 3):  # five local layers and a global one
        expected = fp.flash_attention(q, k, v, window=(window, 0))
        np.testing.assert_allclose(layer(window), expected, rtol=1e-5, atol=1e-6)
    assert layer._cache_size() == 1


def test_bad_modifiers_are_found_in_empty_calls():
    with pytest.raises(ValueError, match="together"):
        fp.flash_attention(Q[:, :0], K, K, q_segment_ids=IDS[:, :0])


SAME = {
    "window, a list": ({"window": [2, np.int64(1)]}, {"window": (2, 1)}),
    "window, an int": ({"window": np.int32(2)}, {"window": (2, 2)}),
    "causal wins on the right": ({"window": (2, 5), "causal": True}, {"window": (2, 0)}),
    "a window past int32": ({"window": 2**40}, {}),
    "lengths of one number": (
        {"kv_lengths": 4, "q_lengths": np.int32(7)},
        {"kv_lengths": jnp.full(2, 4, jnp.int32), "q_lengths": jnp.full(2, 7, jnp.int16)},
    ),
    "lengths of all keys": ({"kv_lengths": jnp.array([10, 10])}, {}),
    "numpy arrays": (
        {"bias": np.full(FULL, 0.5, np.float16), "alibi_slopes": np.ones(4, np.float32)},
        {"bias": jnp.full((1, 1, 1, 1), 0.5), "alibi_slopes": jnp.ones((2, 4), jnp.bfloat16)},
    ),
    "a seed without a rate": ({"dropout_rate": 0, "dropout_seed": jnp.ones(2)}, {}),
    "a seed in two forms": (
        {"dropout_rate": 0.5, "dropout_seed": jax.random.key(3)},
        {"dropout_rate": np.float32(0.5), "dropout_seed": jax.random.PRNGKey(3)},
    ),
    "ids that are all equal": (
        {"q_segment_ids": IDS.astype(jnp.uint8) + 7, "kv_segment_ids": KV_IDS + 7},
        {"q_segment_ids": IDS, "kv_segment_ids": KV_IDS},
    ),
    "two paddings": (
        {"q_segment_ids": IDS - 5, "kv_segment_ids": KV_IDS - 5},
        {"kv_lengths": 0},
    ),
}


@pytest.mark.thorough(
    always=["two paddings", "a seed without a rate", "window, an int", "a seed in two forms"]
)
@pytest.mark.parametrize(("one", "other"), SAME.values(), ids=SAME)
def test_two_ways_to_say_the_same(one, other):
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal(x.shape), jnp.float32) for x in (Q, K, K))
    found, expected = (fp.flash_attention(q, k, v, **keywords) for keywords in (one, other))
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


def test_empty_calls_keep_their_sinks():
    sinks = jnp.arange(4.0)
    o, lse = fp.flash_attention_with_lse(Q, K[:, :0], K[:, :0], sinks=sinks)
    assert not o.any()
    np.testing.assert_array_equal(lse, jnp.broadcast_to(sinks[None, :, None], (2, 4, 8)))
    lse = fp.flash_attention_with_lse(Q, K, K, kv_lengths=0, sinks=sinks)[1]
    np.testing.assert_allclose(lse, np.broadcast_to(sinks[None, :, None], (2, 4, 8)), rtol=1e-6)
    lengths = jnp.array([0, 5])
    for k in (K[:, :0], K):  # as where there are keys, all hidden
        hidden = {} if not k.shape[1] else {"kv_lengths": 0}
        call = lambda sinks, k=k, hidden=hidden: fp.flash_attention_with_lse(
            Q, k, k, q_lengths=lengths, sinks=sinks, **hidden
        )[1]
        lse = call(sinks)
        assert jnp.isneginf(lse[0]).all() and jnp.isneginf(lse[1, :, 5:]).all()
        np.testing.assert_allclose(lse[1, :, :5], np.broadcast_to(sinks[:, None], (4, 5)), 1e-6)
        found = jax.grad(lambda sinks, call=call: jnp.sum(call(sinks)[1, :, :5]))(sinks)
        np.testing.assert_allclose(found, 5.0, 1e-6)
    most = fp.flash_attention_with_max_logit(Q, K[:, :0], K[:, :0], sinks=sinks)[2]
    assert most.shape == (2, 4, 8) and jnp.isneginf(most).all()


def test_the_largest_softcaps_and_sinks_cap_nothing_and_take_all():
    q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 8, 4, 16))
    found, expected = fp.flash_attention(q, k, v, softcap=1e30), fp.flash_attention(q, k, v)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    sinks = jnp.array([jnp.inf, 1.0, -jnp.inf, 2.0])
    attend = lambda q, sinks: fp.flash_attention(q, k, v, sinks=sinks)
    o = attend(q, sinks)
    assert not o[:, :, 0].any() and jnp.isfinite(o).all()
    np.testing.assert_allclose(o[:, :, 2], expected[:, :, 2], rtol=1e-6)
    loss = lambda q, sinks: jnp.sum(jnp.sin(attend(q, sinks)))
    dq, dsinks = jax.grad(loss, (0, 1))(q, sinks)
    assert jnp.isfinite(dq).all() and not dq[:, :, 0].any()
    assert jnp.isfinite(dsinks).all() and not dsinks[0] and not dsinks[2]
    decoded = fp.flash_decode(q[:, :1], k, v, sinks=sinks)
    assert not decoded[:, :, 0].any() and jnp.isfinite(decoded).all()


@pytest.mark.parametrize("shape", [(8, 10), (2, 10), (2, 8, 10), (4, 8, 10)], ids=str)
def test_the_hint_of_a_mask_of_few_axes_works(shape):
    mask = jnp.ones(shape, bool)
    with pytest.raises(ValueError, match="add axes, as in") as caught:
        fp.flash_attention(Q, K, K, mask=mask)
    (way,) = re.findall(r"mask(\[[^\]]*\]) if", str(caught.value))
    assert fp.flash_attention(Q, K, K, mask=eval(f"mask{way}")).shape == Q.shape
