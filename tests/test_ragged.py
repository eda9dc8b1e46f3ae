"""Ragged attention over pages against the dense oracle; appends; what must be refused."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import flash_pallas as fp
from flash_pallas.backends.hopper import HopperBackend
from flash_pallas.backends.portable import PortableBackend
from flash_pallas.backends.xla import XlaBackend
from flash_pallas.backends.xla import decode as xla_decode
from flash_pallas.backends.xla import ragged as xla_ragged
from flash_pallas.core import ragged
from flash_pallas.core.ragged import RaggedOperands
from flash_pallas.frontend import dispatch

from .checks import explain_on
from .interpreter import race_checked
from .ragged_cases import MIXES, PAGE, ROOM, Mix, assert_right, attend


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(xla_decode, "BLOCK", 48)
    monkeypatch.setattr(xla_ragged, "BLOCK_Q", 16)


@pytest.mark.thorough(always=["latent float8", "together"])
@pytest.mark.parametrize("name", MIXES)
def test_the_oracle(name):
    mix = MIXES[name]
    drawn = mix.draw()
    given = jax.tree.map(jnp.asarray, drawn)
    assert_right(mix, drawn, jax.jit(partial(attend, mix))(*given))


def test_float64():
    with jax.enable_x64(True):
        mix = Mix(N=2, K=1, H=8, Hv=8)
        q, k, v, arguments = mix.draw()
        wide = [jnp.asarray(x.astype(np.float64)) for x in (q, k, v)]
        o, lse = attend(mix, *wide, jax.tree.map(jnp.asarray, arguments))
        assert o.dtype == lse.dtype == jnp.float64
        np.testing.assert_allclose(o, dense(*map(np.asarray, wide), **arguments), atol=1e-13)


def dense(q, k, v, *, kv_lengths, page_table, cu_q_lens, num_seqs):
    """Computes o row by row, in float64."""
    o = np.zeros((*q.shape[:2], v.shape[-1]))
    group, room = q.shape[1] // k.shape[2], page_table.shape[1] * k.shape[1]
    for s in range(int(np.squeeze(num_seqs))):
        table = np.clip(page_table[s], 0, len(k) - 1)
        length = kv_lengths[s]
        keys, values = (
            np.repeat(x[table].reshape(room, *x.shape[2:]), group, axis=1).astype(float)
            for x in (k, v)
        )
        for row in range(cu_q_lens[s], cu_q_lens[s + 1]):
            seen = max(length - (cu_q_lens[s + 1] - 1 - row), 0)
            if seen:
                score = np.einsum("nh,snh->ns", q[row], keys[:seen]) / np.sqrt(q.shape[-1])
                p = np.exp(score - score.max(-1, keepdims=True))
                p /= p.sum(-1, keepdims=True)
                o[row] = np.einsum("ns,snh->nh", p, values[:seen])
    return o


def random_mix(rng, seqs: int, tokens: int, pages: int):
    """Draws integers of a call: any number of sequences, prompts and steps, shared pages."""
    num_seqs = rng.integers(0, seqs + 1)
    count = np.where(rng.random(seqs) < 0.5, 1, rng.integers(0, tokens, seqs))
    ends = np.minimum(np.cumsum([0, *count]), tokens)
    count = np.diff(ends)
    # Some have more than the 5 pages of each have room for.
    length = count + rng.integers(0, 5 * PAGE + 5, seqs) * (rng.random(seqs) < 0.7)
    ends[num_seqs + 1 :] = rng.integers(-9, 99, seqs - num_seqs)
    table = rng.integers(0, pages, (seqs, 5))
    found = {"kv_lengths": length, "page_table": table, "cu_q_lens": ends}
    return {name: x.astype(np.int32) for name, x in found.items()} | {"num_seqs": num_seqs}


def test_one_program_serves_every_mix():
    rng = np.random.default_rng(0)
    q = rng.standard_normal((40, 2, 8)).astype(np.float32)
    k, v = rng.standard_normal((2, 12, PAGE, 1, 8)).astype(np.float32)
    traces = []

    @jax.jit
    def call(q, k, v, places):
        traces.append(1)
        return fp.ragged_paged_attention(q, k, v, step_tokens=2, **places)

    for _ in range(100):
        places = random_mix(rng, seqs=6, tokens=40, pages=12)
        padded = q.copy()
        padded[places["cu_q_lens"][places["num_seqs"]] :] = np.nan
        found = call(padded, k, v, places)
        np.testing.assert_allclose(found, dense(q, k, v, **places), rtol=1e-4, atol=1e-5)
    assert len(traces) == 1


def test_integers_are_put_in_range():
    rng = np.random.default_rng(2)
    for _ in range(20):
        draw = lambda *shape: jnp.asarray(rng.integers(-9, 60, shape), jnp.int32)
        given = RaggedOperands(
            Q, PAGES, PAGES, draw(6), jnp.zeros((6, 2), jnp.int32), draw(7), num_seqs=draw()
        )
        found = ragged.in_range(given)
        ends, number = np.asarray(found.cu_q_lens), int(found.num_seqs)
        assert ends.min() >= 0 and ends.max() <= len(Q) and (np.diff(ends) >= 0).all()
        assert number == min(max(int(given.num_seqs), 0), 6) and (ends[number:] == ends[-1]).all()
        np.testing.assert_array_equal(found.kv_lengths, np.maximum(given.kv_lengths, 0))


def test_hostile_integers_read_nothing_else():
    rng = np.random.default_rng(1)
    q = jnp.asarray(rng.standard_normal((30, 2, 8)), jnp.float32)
    k, v = jnp.asarray(rng.uniform(-1, 1, (2, 5, PAGE, 1, 8)), jnp.float32)
    new = jnp.full((30, 1, 8), 9.0)
    call = jax.jit(partial(fp.ragged_paged_attention, return_lse=True, step_tokens=3))
    append = jax.jit(lambda **places: fp.append_ragged_kv((k, v), new, new, **places))
    most = 2**31 - 1
    numbers = np.array([-most - 1, -3, -1, 0, 1, 2, 7, 20, 31, most], np.int32)
    for _ in range(50):
        draw = lambda *shape: rng.choice(numbers, shape)
        places = {"kv_lengths": draw(4), "page_table": draw(4, 3), "cu_q_lens": draw(5)}
        places["num_seqs"] = draw(1)
        o, lse = call(q, k, v, **places, kv_starts=draw(4))
        assert (abs(o) <= 1.0 + 1e-6).all() and not jnp.isnan(lse).any() and (lse < most).all()
        for old, found in zip((k, v), append(**places), strict=True):
            written = (found == 9.0).all(-1)
            assert ((found == old).all(-1) | written).all() and written.sum() <= 30


@pytest.mark.parametrize(
    "mix", [Mix(shared=True), Mix(cache="int8", H=16, Hv=16)], ids=["latent", "int8"]
)
def test_new_tokens_are_written_first(mix):
    q, k, v, arguments = mix.draw()
    ends, lengths, table = (arguments[x] for x in ("cu_q_lens", "kv_lengths", "page_table"))
    lengths[[5, 7]] = 140, -5  # no room for the last 12 of 17 tokens, and no position at all
    table[0, 4] = -1  # the last 16 of 37 tokens, at 64 to 79, have no page
    news = (
        np.random.default_rng(0).standard_normal((2, mix.tokens, mix.K, mix.H)).astype(np.float32)
    )
    news[:, ends[len(mix.sequences)] :] = np.nan
    wanted = [np.array(x) for x in (k, v) if x is not None]
    for name, x, new in zip(("k_scale", "v_scale"), wanted, news, strict=False):
        for s, (count, _) in enumerate(mix.sequences):
            for t in range(count):
                place = lengths[s] - count + t
                if 0 <= place < ROOM and (page := table[s, place // PAGE]) >= 0:
                    found = new[ends[s] + t]
                    if mix.cache:
                        scaled = found / arguments[name][page][:, None]
                        found = np.clip(np.round(scaled), -127, 127)
                    x[page, place % PAGE] = found
    given = {"new_k": news[0], "new_v": None if v is None else news[1]}
    call = jax.jit(partial(attend, mix), donate_argnums=(1, 2))
    lowered = call.lower(q, k, v, arguments | given)
    o, lse, pages = lowered.compile()(q, k, v, arguments | given)
    for got, right in zip(jax.tree.leaves(pages), wanted, strict=True):
        np.testing.assert_array_equal(*(np.asarray(x, np.float32) for x in (got, right)))
    donated = lowered.as_text().count("tf.aliasing_output")
    assert donated == len(wanted)
    after = jax.jit(partial(attend, mix))(q, *pages, arguments)
    np.testing.assert_array_equal(o, after[0])
    np.testing.assert_array_equal(lse, after[1])


def test_neither_pages_nor_scores_are_held_as_a_whole():
    q, pages = jnp.zeros((1024, 2, 32)), jnp.zeros((64, 256, 1, 32))
    places = {
        "kv_lengths": jnp.zeros(2, jnp.int32),
        "page_table": jnp.zeros((2, 64), jnp.int32),
        "cu_q_lens": jnp.zeros(3, jnp.int32),
    }
    call = jax.jit(lambda q, k, v, places: fp.ragged_paged_attention(q, k, v, **places))
    memory = call.lower(q, pages, pages, places).compile().memory_analysis()
    assert memory.temp_size_in_bytes < pages.nbytes / 2


SMALL = Mix(N=4, K=2, H=8, Hv=8)


def test_vmap():
    q, k, v, arguments = SMALL.draw()
    q, arguments = jnp.nan_to_num(q), jax.tree.map(jnp.asarray, arguments)
    lengths = jnp.stack([arguments["kv_lengths"], jnp.minimum(arguments["kv_lengths"], 60)])
    qs = jnp.stack([q, 2 * q, -q])
    call = lambda q, n: attend(SMALL, q, k, v, arguments | {"kv_lengths": n})[0]
    found = jax.vmap(jax.vmap(call, (None, 0)), (0, None))(qs, lengths)
    assert found.shape == (3, 2, *q.shape)
    for i, j in ((0, 0), (2, 1)):
        np.testing.assert_allclose(found[i, j], call(qs[i], lengths[j]), rtol=1e-5, atol=1e-6)
    none = jax.vmap(lambda q: call(q, lengths[0]))
    assert jax.eval_shape(none, qs[:0]).shape == (0, *q.shape)


@pytest.mark.thorough(always=["explicit"])
@pytest.mark.parametrize("kind", ["explicit", "auto", "shard_map"])
def test_heads_on_a_mesh(kind, devices):
    q, k, v, arguments = jax.tree.map(jnp.asarray, SMALL.draw())
    new = jax.random.normal(jax.random.key(0), (SMALL.tokens, 2, 8))
    arguments |= {"new_k": new, "new_v": new + 1, "sinks": jnp.arange(4.0)}
    wanted = jax.jit(partial(attend, SMALL))(q, k, v, arguments)
    axis = AxisType.Explicit if kind == "explicit" else AxisType.Auto
    mesh = jax.make_mesh((2,), ("model",), axis_types=(axis,), devices=devices[:2])
    rows, pages = jax.P(None, "model"), jax.P(None, None, "model")
    if kind == "shard_map":
        specs = dict.fromkeys(arguments, jax.P()) | {"new_k": rows, "new_v": rows}
        specs["sinks"] = jax.P("model")
        found = jax.jit(
            jax.shard_map(
                partial(attend, SMALL),
                mesh=mesh,
                in_specs=(rows, pages, pages, specs),
                out_specs=(rows, jax.P("model"), (pages, pages)),
            )
        )(q, k, v, arguments)
    else:
        put = lambda x, spec: jax.device_put(x, jax.NamedSharding(mesh, spec))
        arguments |= {name: put(arguments[name], rows) for name in ("new_k", "new_v")}
        given = {name: x for name, x in arguments.items() if name[:3] != "new"}
        with jax.set_mesh(mesh):
            call = jax.jit(partial(attend, SMALL))
            found = call(put(q, rows), put(k, pages), put(v, pages), arguments)
    if kind == "explicit":
        with pytest.raises(ValueError, match="the axis of tokens of q is sharded over"):
            jax.eval_shape(partial(attend, SMALL), put(q, jax.P("model")), k, v, given)
        assert jax.typeof(found[0]).sharding.spec == jax.P(None, "model", None)
        assert jax.typeof(found[2][0]).sharding.spec == jax.P(None, None, "model", None)
    for got, right in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(got, right, rtol=1e-5, atol=1e-5)


def test_there_is_no_derivative_unless_it_is_stopped():
    q, k, v, arguments = jax.tree.map(jnp.asarray, SMALL.draw())
    call = lambda q: jnp.sum(attend(SMALL, q, k, v, arguments)[0])
    with pytest.raises(NotImplementedError, match="ragged_paged_attention has no derivative: use"):
        jax.eval_shape(jax.grad(call), q)
    loss = lambda q: jnp.sum(q) + jax.lax.stop_gradient(call(q))
    assert jax.eval_shape(jax.grad(loss), q).shape == q.shape


def array(*shape, dtype=jnp.float32):
    return jnp.ones(shape, dtype)


INTEGERS = {
    "kv_lengths": jnp.array([40, 9]),
    "page_table": jnp.zeros((2, 3), jnp.int32),
    "cu_q_lens": jnp.array([0, 5, 6]),
}
Q, PAGES = array(8, 4, 16), array(5, 16, 2, 16)
NEW = array(8, 2, 16)
BAD: dict[str, tuple[tuple, dict[str, Any], type, str]] = {
    "rank": ((Q[None], PAGES, PAGES), {}, ValueError, r"q must be \[tokens, heads, head_dim\]"),
    "no pages": ((Q, PAGES[:0], PAGES[:0]), {}, ValueError, "there is no page"),
    "pages": ((Q, PAGES, PAGES[:4]), {}, ValueError, "the pages differ"),
    "page size": ((Q, PAGES[:, :8], PAGES[:, :8]), {}, ValueError, "pages of 8 keys.*multiple"),
    "heads": ((Q[:, :3], PAGES, PAGES), {}, ValueError, "3 heads and k_pages 2.*multiple"),
    "dtypes": ((Q, PAGES.astype("bfloat16"), PAGES), {}, TypeError, "one dtype.*k_pages bfloat16"),
    "list": ((Q, [1.0], PAGES), {}, TypeError, "k_pages must be an array, got list"),
    "lengths": ((), {"kv_lengths": jnp.int32(3)}, ValueError, r"kv_lengths has shape \(\)"),
    "floats": ((), {"kv_lengths": array(2)}, TypeError, "kv_lengths has dtype float32"),
    "table": (
        (),
        {"page_table": jnp.zeros((3, 3), jnp.int32)},
        ValueError,
        r"page_table has shape \(3, 3\).*each of the 2 sequences",
    ),
    "ends": ((), {"cu_q_lens": jnp.array([0, 5])}, ValueError, r"must be \(3,\), one more than"),
    "decreasing": ((), {"cu_q_lens": jnp.array([0, 5, 3])}, ValueError, r"\[0 5 3\].*decrease"),
    "not from 0": ((), {"cu_q_lens": jnp.array([1, 5, 6])}, ValueError, "begin with 0"),
    "too many rows": ((), {"cu_q_lens": jnp.array([0, 5, 9])}, ValueError, "rows of q, 8"),
    "sequences": ((), {"num_seqs": 3}, ValueError, "num_seqs is 3: it must be 0 to 2"),
    "two numbers": ((), {"num_seqs": jnp.array([1, 2])}, ValueError, r"num_seqs has shape \(2,\)"),
    "step": ((), {"step_tokens": 65}, ValueError, "step_tokens is 65: it must be 1 to 64"),
    "traced step": ((), {"step_tokens": jnp.int32(1)}, TypeError, "step_tokens must be an int"),
    "values": ((Q, PAGES, None), {"v_head_dim": 17}, ValueError, "v_head_dim is 17"),
    "window": ((), {"window": -1}, ValueError, "window is -1.*at least 0"),
    "sinks": ((), {"sinks": array(3)}, ValueError, r"sinks has shape \(3,\)"),
    "scale": ((), {"k_scale": array(2)}, TypeError, "only caches of float8_e4m3fn and int8"),
    "return_lse": ((), {"return_lse": 1}, TypeError, "return_lse must be a bool, got 1"),
    "new_v alone": ((), {"new_v": NEW}, ValueError, "new_v is given and new_k is None"),
    "new_k alone": ((), {"new_k": NEW}, ValueError, r"new_v is None and v_pages has shape"),
    "new rows": (
        (),
        {"new_k": NEW[:7], "new_v": NEW[:7]},
        ValueError,
        r"new_k has shape \(7, 2, 16\) and q \(8, 4",
    ),
    "new heads": ((), {"new_k": Q, "new_v": Q}, ValueError, r"must be \[tokens, heads, head_dim\]"),
    "unknown": ((), {"block_tables": 3}, TypeError, "did you mean 'page_table'"),
    "flash-attn's": ((), {"cu_seqlens_q": 3}, TypeError, "did you mean 'cu_q_lens'"),
    "the TPU's": ((), {"kv_pages": 3}, TypeError, "'kv_pages': k_pages and v_pages are two arrays"),
}


def test_no_token_gives_empty_results():
    none = INTEGERS | {"cu_q_lens": jnp.zeros_like(INTEGERS["cu_q_lens"])}
    new = {"new_k": PAGES[0, :0], "new_v": PAGES[0, :0]}
    for call in (fp.ragged_paged_attention, jax.jit(fp.ragged_paged_attention)):
        assert call(Q[:0], PAGES, PAGES[..., :8], **none).shape == (0, *Q.shape[1:-1], 8)
    o, lse, pages = fp.ragged_paged_attention(Q[:0], PAGES, PAGES, return_lse=True, **none, **new)
    assert o.shape == Q[:0].shape and lse.shape == (Q.shape[1], 0)
    np.testing.assert_array_equal(pages[0], PAGES)
    assert fp.explain(fp.ragged_paged_attention, Q[:0], PAGES, PAGES, **none).backend == "none"


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name):
    arrays, options, error, message = BAD[name]
    with pytest.raises(error, match=message):
        fp.ragged_paged_attention(*(arrays or (Q, PAGES, PAGES)), **INTEGERS | options)


def test_ends_past_the_sequences_may_be_anything():
    given = INTEGERS | {"cu_q_lens": jnp.array([0, 5, -3])}
    assert (
        fp.explain(fp.ragged_paged_attention, Q, PAGES, PAGES, **given, num_seqs=1).backend == "xla"
    )
    with pytest.raises(ValueError, match=r"cu_q_lens is \[ 0  5 -3\] up to num_seqs"):
        fp.explain(fp.ragged_paged_attention, Q, PAGES, PAGES, **given)


def test_explain():
    shape = lambda *sizes, dtype="bfloat16": jax.ShapeDtypeStruct(sizes, dtype)
    ints = lambda *sizes: shape(*sizes, dtype="int32")
    places = {"kv_lengths": ints(8), "page_table": ints(8, 64), "cu_q_lens": ints(9)}
    pages = shape(512, 64, 2, 128)
    given = {"k_pages": pages, "v_pages": pages, **places}
    call = fp.ragged_paged_attention
    found = explain_on("A100", call, shape(256, 8, 128), **given)
    assert found.backend == "portable" and found.blocks.steps.num_splits > 1
    assert found.blocks.chunks_on == "xla" and "chunks of prompts run on xla" in str(found)
    assert "ragged_paged_attention on q [256, 8, 128], k [512, 64, 2, 128]" in str(found)
    assert found.reasons["cudnn"].startswith("reads no pages")
    with pytest.raises(fp.UnsupportedByBackend, match="backend='cudnn': reads no pages"):
        fp.explain(call, shape(256, 8, 128), backend="cudnn", **given)
    for tokens in (256, 4):
        found = explain_on("H200", call, shape(tokens, 8, 128), step_tokens=4, **given)
        assert found.backend == found.blocks.chunks_on == "hopper"
        assert (found.blocks.chunks is None) == (tokens == 4)


KERNELS = {
    "hopper": HopperBackend(interpret=True, num_sms=2),
    "portable": PortableBackend(interpret=True, capability="8.0", num_sms=2),
}


# With room for no more than a step, there is no chunk.
OF_KERNELS = {
    "hopper": Mix(dtype="bfloat16", step_tokens=12, sequences=((1, 30), (0, 5), (3, 21))),
    "portable": Mix(dtype="bfloat16", step_tokens=4, sequences=((2, 30), (20, 21), (1, 25))),
}


@pytest.mark.thorough(always=["portable"])
@pytest.mark.interpret
@pytest.mark.parametrize("name", OF_KERNELS)
def test_kernels_run_steps(name, monkeypatch):
    monkeypatch.setattr(dispatch, "BACKENDS", {name: KERNELS[name]})
    mix = dataclasses.replace(OF_KERNELS[name], options=(("num_splits", 1),))
    drawn = mix.draw()
    given = jax.tree.map(jnp.asarray, drawn)
    with race_checked():
        found = jax.jit(partial(attend, mix))(*given)
    assert_right(mix, drawn, found)


def test_kernels_are_lowered_for_gpus(monkeypatch):
    backends = {"portable": PortableBackend(capability="8.0", num_sms=108), "xla": XlaBackend()}
    monkeypatch.setattr(dispatch, "BACKENDS", backends)
    mix = Mix(dtype="bfloat16", step_tokens=4)
    given = jax.tree.map(jnp.asarray, mix.draw())
    text = jax.jit(partial(attend, mix)).trace(*given).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text


def test_what_kernels_refuse(monkeypatch):
    monkeypatch.setattr(dispatch, "BACKENDS", {**KERNELS, "xla": XlaBackend()})
    found = fp.explain(fp.ragged_paged_attention, Q, PAGES, PAGES, **INTEGERS)
    assert found.backend == "xla"
    assert all("not float32" in found.reasons[name] for name in KERNELS)
