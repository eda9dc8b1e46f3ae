"""`flash_attention_varlen` against the oracle, document by document."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from flash_pallas import explain, flash_attention_varlen, reference, varlen
from flash_pallas.backends.hopper import HopperBackend
from flash_pallas.frontend import dispatch, validate
from flash_pallas.transforms import derivatives

from .checks import explain_on
from .interpreter import race_checked
from .test_portable_interpreted import BACKEND as PORTABLE

N, K, H = 4, 2, 32
LENGTHS = ((37, 0, 1, 90, 14), (50, 9, 64, 90, 0))  # of queries and of keys
PADDED = 13  # rows beyond the last document

CALLS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (20, 3)},
    "window_array": {"window": (jnp.int32(20), 0)},
    "alibi_softcap": {"alibi_slopes": jnp.linspace(0.01, 0.3, N), "softcap": 4.0, "causal": True},
    "sinks": {"sinks": jnp.linspace(-1.0, 1.0, N), "window": (7, 7)},
    "mods": {
        "score_mod": lambda s, b, n, i, j: s - 0.02 * jnp.abs(i - 2 * j).astype(s.dtype),
        "mask_mod": lambda b, n, i, j: (i + 2 * j) % 5 != 0,
        "causal": True,
    },
}


def _cu(lengths):
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def _arrays(lengths, poison: bool, dtype=jnp.float32):
    rng = np.random.default_rng(3)
    totals = [sum(n) + PADDED for n in lengths]
    shapes = ((totals[0], N, H), (totals[1], K, H), (totals[1], K, H), (totals[0], N, H))
    found = [rng.standard_normal(shape) for shape in shapes]
    for x in found if poison else ():
        x[-PADDED:] = np.nan
    return [jnp.asarray(x, dtype) for x in found]


def _by_document(q, k, v, lengths, alignment, call):
    """Computes (o, lse) of packed arrays by the oracle, one document after the other."""
    of_q, of_kv = (_cu(n) for n in lengths)
    o, lse = jnp.zeros((len(q), N, v.shape[2]), q.dtype), jnp.full((N, len(q)), -jnp.inf)
    for d, (t, s) in enumerate(zip(*lengths, strict=True)):
        rows, cols = (slice(cu[d], cu[d + 1]) for cu in (of_q, of_kv))
        if t and s:
            offset = s - t if alignment == "end" else 0
            given = (q[None, rows], k[None, cols], v[None, cols])
            out, sums = reference.attention(*given, q_offset=offset, **call)
            o, lse = o.at[rows].set(out[0]), lse.at[:, rows].set(sums[0])
        elif t and "sinks" in call:
            lse = lse.at[:, rows].set(call["sinks"][:, None])
    return o, lse


def _loss(attention, do):
    """Returns the function of q, k and v whose gradients tests compare."""

    def loss(q, k, v):
        o, lse = attention(q, k, v)
        rows = o[: len(o) - PADDED], jnp.where(jnp.isfinite(lse), lse, 0.0)[:, : len(o) - PADDED]
        return jnp.sum(rows[0].astype(jnp.float32) * do[: len(o) - PADDED]) + jnp.sum(
            jnp.sin(rows[1])
        )

    return loss


@pytest.mark.thorough(always=["window-end", "mods-start"])
@pytest.mark.parametrize("alignment", ["start", "end"])
@pytest.mark.parametrize("name", CALLS)
def test_varlen_is_every_document_by_itself(name, alignment):
    call = CALLS[name]
    q, k, v, do = _arrays(LENGTHS, poison=False)
    cu = {"cu_seqlens_q": _cu(LENGTHS[0]), "cu_seqlens_kv": _cu(LENGTHS[1])}
    blocks = {"block_q": 32, "block_kv": 32}

    def ours(q, k, v):
        return flash_attention_varlen(
            q, k, v, **cu, **call, alignment=alignment, backend="xla", blocks=blocks,
            return_lse=True,
        )  # fmt: skip

    oracle = lambda q, k, v: _by_document(q, k, v, LENGTHS, alignment, call)
    found, wanted = (
        jax.jit(lambda *x, f=f: (f(*x), jax.grad(_loss(f, do), (0, 1, 2))(*x)))(q, k, v)
        for f in (ours, oracle)
    )
    for bound, mine, others in zip((4e-6, 2e-5), found, wanted, strict=True):
        for x, y in zip(mine, others, strict=True):
            np.testing.assert_allclose(x, y, rtol=0, atol=bound)


@pytest.mark.thorough(always=["plain", "window_array"])
@pytest.mark.parametrize("name", CALLS)
def test_one_array_says_what_queries_and_keys_have(name):
    call, lengths = CALLS[name], (LENGTHS[0], LENGTHS[0])
    q, k, v, do = _arrays(lengths, poison=False)
    poisoned = [x.at[-PADDED:].set(jnp.nan) for x in (q, k, v)]
    blocks = {"block_q": 32, "block_kv": 32}

    def ours(cu, q, k, v):
        return flash_attention_varlen(
            q, k, v, cu_seqlens_q=cu, **call, backend="xla", blocks=blocks, return_lse=True
        )

    @jax.jit
    def both(cu, q, k, v):
        packed = functools.partial(ours, cu)
        return packed(q, k, v), jax.grad(_loss(packed, do), (0, 1, 2))(q, k, v)

    oracle = lambda q, k, v: _by_document(q, k, v, lengths, "start", call)
    found = both(jnp.asarray(_cu(LENGTHS[0])), *poisoned)
    wanted = jax.jit(lambda *x: (oracle(*x), jax.grad(_loss(oracle, do), (0, 1, 2))(*x)))(q, k, v)
    for bound, mine, others in zip((4e-6, 2e-5), found, wanted, strict=True):
        for x, y in zip(mine, others, strict=True):
            np.testing.assert_allclose(x, y, rtol=0, atol=bound)


@pytest.mark.thorough
@pytest.mark.interpret
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kernels", ["hopper", "hopper split", "portable"])
def test_kernels_on_packed_arrays(kernels, causal):
    hopper = kernels != "portable"
    chosen = HopperBackend(interpret=True, num_sms=2) if hopper else PORTABLE
    blocks = {"forward": {"warpgroups": 3, "block_kv": 64}} if hopper else None
    lengths, heads = (70, 1, 0, 90, 30), (1, 1, 1, 1)
    total = sum(lengths) + PADDED
    keys = jax.random.split(jax.random.key(5), 4)
    *given, do = (jax.random.normal(x, (total, n, 128)) for x, n in zip(keys, heads, strict=True))
    absent = ("window", "bias", "mask", "alibi_slopes", "score_mod", "mask_mod")
    options = dict.fromkeys(absent) | {"causal": causal}
    options["deterministic"] = kernels == "hopper split"

    def results(backend, blocks, dtype):
        def attend(q, k, v):
            places = jnp.asarray(_cu(lengths)), None, None
            arrays, arguments = varlen._as_one(q, k, v, places, options)
            call = validate.canonicalize(*arrays, arguments)
            tiles = backend.attention.plan(call.problem, blocks)
            return derivatives.attend(backend, call.spec, tiles, call.operands)[0][0]

        poisoned = [x.astype(dtype).at[-PADDED:].set(jnp.nan) for x in given]
        o, pull = jax.vjp(attend, *poisoned)
        found = [o, *pull(do.astype(dtype))]
        return [np.asarray(x.astype(jnp.float32)) for x in found]

    with race_checked():
        found = results(chosen, blocks, jnp.bfloat16)
    xla = dispatch.BACKENDS["xla"]
    exact, plain = (results(xla, None, dtype) for dtype in (jnp.float32, jnp.bfloat16))
    for factor, e, p, f in zip((2, 3, 3, 3), exact, plain, found, strict=True):
        assert not f[-PADDED:].any()
        assert np.abs(f - e).max() <= factor * np.abs(p - e).max()


def test_traced_lengths_compile_once_and_padding_may_hold_anything():
    call = jax.jit(
        lambda q, k, v, cu: flash_attention_varlen(q, k, v, cu_seqlens_q=cu, causal=True)
    )
    first = ((37, 0, 1, 90, 14),) * 2
    for lengths in (first, ((90, 14, 37, 1, 0),) * 2):
        q, k, v, _ = _arrays(lengths, poison=True)
        o = call(q, k, v, _cu(lengths[0]))
        wanted, _ = _by_document(q, k, v, lengths, "start", {"causal": True})
        np.testing.assert_allclose(o[:-PADDED], wanted[:-PADDED], rtol=0, atol=4e-6)
        assert not o[-PADDED:].any()
    assert call._cache_size() == 1


def test_no_array_of_queries_by_keys_is_made():
    total, documents = 1 << 16, 64
    x = jax.ShapeDtypeStruct((total, 2, 64), jnp.bfloat16)
    cu = jax.ShapeDtypeStruct((documents + 1,), jnp.int32)

    def loss(x, cu):
        o = flash_attention_varlen(x, x, x, cu_seqlens_q=cu, causal=True, backend="xla")
        return o.astype(jnp.float32).sum()

    memory = jax.jit(jax.grad(loss)).lower(x, cu).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 40 * total * 2 * 64 * 2


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("shapes", ["arrays", "shapes of q, k and v"])
def test_explain_is_of_the_call_that_runs(whole, shapes, monkeypatch):
    x = jnp.ones((200, 4, 32), jnp.bfloat16)
    given = x if shapes == "arrays" else jax.ShapeDtypeStruct(x.shape, x.dtype)
    cu = {"cu_seqlens_q": np.array([0, 150, 200 if whole else 190], np.int32)}
    call = cu | {"causal": True, "sinks": jnp.ones(4), "score_mod": lambda s, b, n, i, j: s * 2}
    seen, plan = [], dispatch.plan
    monkeypatch.setattr(
        dispatch, "plan", lambda problem, *a: seen.append(problem) or plan(problem, *a)
    )
    for mods in (True, False):
        options = call if mods else {name: x for name, x in call.items() if name != "score_mod"}
        found = explain(flash_attention_varlen, *[given] * 3, **options, blocks={"block_q": 32})
        flash_attention_varlen(x, x, x, **options)
        explained, ran = seen[-2:]
        assert found.problem == explained and found.blocks.block_q == 32
        assert explained.features == ran.features and explained.kv_len == ran.kv_len == 200
        assert ("kv_lengths" in ran.features) != whole


def test_parts_of_the_queries_have_one_loop():
    shapes = [jax.ShapeDtypeStruct((n, heads, 128), jnp.bfloat16) for n, heads in
              ((1024, 32), (1024, 8), (1024, 8), (32768, 32), (32768, 8), (32768, 8))]  # fmt: skip
    cu = jax.ShapeDtypeStruct((9,), jnp.int32)
    few, many = (
        explain_on(
            "H100", flash_attention_varlen, *given, cu_seqlens_q=cu, causal=True
        ).blocks.backward
        for given in (shapes[:3], shapes[3:])
    )
    assert few.split_q > 1
    assert few.mask_all
    assert many.split_q == 1
    assert not many.mask_all


def test_explain_answers_for_gpus_that_are_not_here():
    x = jax.ShapeDtypeStruct((4096, 8, 64), jnp.bfloat16)
    call = {"cu_seqlens_q": jax.ShapeDtypeStruct((9,), jnp.int32), "causal": True}
    names = ("H100", "A100", "B200", None)
    found = [explain_on(gpu, flash_attention_varlen, x, x, x, **call) for gpu in names]
    assert [each.backend for each in found] == ["hopper", "portable", "portable", "xla"]
    assert "q [1, 4096, 8, 64]" in str(found[0]) and "cudnn" in found[2].reasons
    with pytest.raises(ValueError, match="alignment is None"):
        explain(flash_attention_varlen, x, x, x, **call, cu_seqlens_kv=call["cu_seqlens_q"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cu_seqlens_q": np.array([0, 10, 5])}, "never decrease"),
        ({"cu_seqlens_q": np.array([1, 10])}, "begin with 0"),
        ({"cu_seqlens_q": np.array([0, 99])}, "number of rows, 20"),
        ({"cu_seqlens_q": np.array([0.0, 20.0])}, "cu_seqlens_q"),
        ({"cu_seqlens_q": np.array([[0, 20]])}, r"documents \+ 1"),
        ({"cu_seqlens_kv": np.array([0, 4, 20])}, "same number"),
        ({"cu_seqlens_kv": np.array([0, 20]), "causal": True}, "alignment is None"),
        ({"alignment": "left"}, "'start' and 'end'"),
        ({"q": jnp.ones((1, 20, 4, 32))}, r"\[total, heads, head_dim\]"),
        ({"q": jnp.ones((21, 4, 32))}, "cu_seqlens_kv"),
        ({"bias": jnp.ones((20, 20))}, r"\[heads, total_q, total_kv\]"),
        ({"max_seqlen_q": 20}, "unexpected"),
    ],
)
def test_what_is_refused(change, message):
    x = jnp.ones((20, 4, 32))
    call = {"q": x, "k": x, "v": x, "cu_seqlens_q": np.array([0, 20])} | change
    with pytest.raises((TypeError, ValueError), match=message):
        flash_attention_varlen(**call)


def test_checks_of_gradients():
    q, k, v, _ = _arrays(((9, 4), (9, 4)), poison=False)
    call = lambda q, k, v: flash_attention_varlen(
        q, k, v, cu_seqlens_q=np.array([0, 9, 13]), window=(3, 1)
    )
    check_grads(call, (q, k, v), order=1, modes=("rev",), atol=2e-2, rtol=2e-2)
