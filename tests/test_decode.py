"""Decoding against the dense oracle: lengths, pages, modifiers, splits; what must be refused."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flash_pallas as fp
from flash_pallas import reference
from flash_pallas.backends.base import Refused
from flash_pallas.backends.xla import XlaBackend
from flash_pallas.backends.xla import decode as xla_decode
from flash_pallas.frontend import dispatch

from . import checks

BLOCK = 128
LENGTHS = (0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 336)
B, S = len(LENGTHS), LENGTHS[-1]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(xla_decode, "BLOCK", BLOCK)


@dataclasses.dataclass(frozen=True)
class Step:
    """One decode call. `pages` is how the table is drawn: "shuffled", or "repeated" and shared."""

    T: int = 1
    N: int = 4
    K: int = 2
    Hv: int = 32
    dtype: str = "float32"
    pages: str = "shuffled"
    page_size: int = 16
    num_splits: Any = "auto"
    sides: tuple[str, ...] = ()
    options: tuple[tuple[str, Any], ...] = ()

    def draw(self):
        """Draws (q, (k, v), (pages of k, pages of v), page table, arguments), in self.dtype.

        The contiguous arrays and the pages hold the same keys, and NaN where there is none.
        """
        rng = np.random.default_rng(7)
        normal = lambda *shape: rng.standard_normal(shape).astype(jnp.dtype(self.dtype))
        columns, lengths = S // self.page_size, np.array(LENGTHS, np.int32)
        total = B * columns if self.pages == "shuffled" else 5
        pages = [normal(total, self.page_size, self.K, width) for width in (32, self.Hv)]
        table = rng.integers(total, size=(B, columns))
        if self.pages == "shuffled":
            table = rng.permutation(total).reshape(B, columns)
        kv = [x[table].reshape(B, S, *x.shape[2:]) for x in pages]
        starts = np.array([0, 1, 64, 127, BLOCK, 0], np.int32)  # the second has no key then
        past = np.arange(S)[None] >= lengths[:, None]
        if "starts" in self.sides:
            past |= np.arange(S)[None] < starts[:, None]
        unused = past.reshape(B, columns, -1).all(-1)
        for x in kv:
            x[past] = np.nan
        for x in pages:
            x[np.setdiff1d(table[unused], table[~unused])] = np.nan
        garbage = rng.choice([-1, -(2**31), 2**31 - 1, total], size=table.shape)
        table = np.where(unused, garbage, table).astype(np.int32)
        arguments: dict[str, Any] = {"kv_lengths": lengths}
        if "alibi" in self.sides:
            arguments["alibi_slopes"] = rng.uniform(0.0, 0.2, self.N).astype(np.float32)
        if "sinks" in self.sides:
            arguments["sinks"] = rng.standard_normal((B, self.N)).astype(np.float32)
        if "crowded" in self.sides:  # two of the last sequence's new tokens have no room
            arguments["kv_lengths"] = np.where(lengths == S, S + 2, lengths).astype(np.int32)
        if "offset" in self.sides:
            arguments["q_offset"] = np.array([0, 5, 100, -3, 128, 300], np.int32)
        if "starts" in self.sides:
            arguments["kv_starts"] = starts
        if "windows" in self.sides:
            arguments["window"] = np.array([3, 0, 40, 200, 129, BLOCK], np.int32)
        found = (normal(B, self.T, self.N, 32), kv, pages, table, arguments)
        return jax.tree.map(jnp.asarray, found)


STEPS = {
    "one token": Step(),
    "four tokens": Step(T=4, sides=("sinks",), page_size=48),
    "sixteen tokens": Step(T=16, N=2, K=1, Hv=16),
    "no group": Step(T=2, N=2, pages="repeated", num_splits=2),
    "window": Step(T=4, options=(("window", 40),), num_splits=3),
    "softcap": Step(page_size=112, options=(("softcap", 2.0), ("scale", -0.7))),
    "alibi": Step(T=3, sides=("alibi",), pages="repeated", num_splits=16),
    "offset": Step(T=4, sides=("offset",), options=(("window", (100, 5)),)),
    "without room": Step(T=4, sides=("alibi", "crowded"), options=(("window", 40),)),
    "starts": Step(T=4, sides=("starts", "sinks", "alibi"), num_splits=2),
    "starts and windows": Step(T=2, sides=("starts", "windows"), num_splits=3),
    "bfloat16": Step(dtype="bfloat16", T=4, sides=("sinks",), num_splits=3),
    "float16": Step(dtype="float16", T=2, N=8, K=1, pages="repeated", page_size=48),
    "together": Step(
        T=5,
        sides=("sinks", "alibi", "offset"),
        options=(("softcap", 3.0), ("window", 90)),
        num_splits=128,
    ),
}


def dense(function, step: Step, arguments):
    """Returns `function` of (q, k, v) with the arguments as the dense functions call them."""
    offset = {"q_offset": arguments["kv_lengths"] - step.T}
    options = offset | arguments | dict(step.options)
    if "starts" in step.sides:
        hidden = jnp.arange(S, dtype=jnp.int32)[None] < options.pop("kv_starts")[:, None]
        options["kv_segment_ids"] = jnp.where(hidden, -1, 0)
        options["q_segment_ids"] = jnp.zeros((B, step.T), jnp.int32)
    return lambda q, k, v: function(q, k, v, causal=True, **options)


@pytest.mark.thorough(always=["without room"])
@pytest.mark.parametrize("name", STEPS)
def test_the_oracle(name):
    step = STEPS[name]
    q, kv, pages, table, arguments = step.draw()
    plain = jax.jit(dense(checks.plain, step, arguments))(q, *kv)
    with jax.enable_x64(True):
        wide = [np.asarray(x).astype(np.float64) for x in (q, *kv)]
        calls = [dense(f, step, arguments) for f in (reference.attention, partial(terms, q.dtype))]
        both = jax.jit(lambda *arrays: [call(*arrays) for call in calls])
        exact, floors = jax.tree.map(np.asarray, both(*wide))

    def decode(q, k, v, arguments):
        options = {"num_splits": step.num_splits, "return_lse": True, **dict(step.options)}
        return fp.flash_decode(q, k, v, **options, **arguments)

    for cache, extra in ((kv, {}), (pages, {"page_table": table})):
        found = jax.jit(decode)(q, *cache, arguments | extra)
        assert found[0].dtype == q.dtype and found[1].dtype == jnp.float32
        for got, near, right, floor in zip(found, plain, exact, floors, strict=True):
            assert_close(got, near, right, floor)


def terms(dtype, q, k, v, **arguments):
    """Computes floors of the errors of o and lse; checks.py has its own, for a Case."""
    m, group = reference.Modifiers(**arguments), q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(m.cleared_keys(x), group, axis=2) for x in (k, v))
    scale = q.shape[-1] ** -0.5 if m.scale is None else m.scale
    qk = scale * jnp.einsum("btnh,bsnh->bnts", q, k)
    keep = m.visible(qk.shape)
    s = m.logits(qk, keep)
    p, lse, _ = m.softmax(s, keep)
    size = jnp.where(keep, jnp.abs(s), 0.0)
    lse = jnp.where(jnp.isfinite(lse), jnp.abs(lse), 0.0)
    single, own = (float(jnp.finfo(x).eps) for x in (jnp.float32, dtype))
    # exp(s - lse) inherits the rounding of s and of lse, in float32.
    p = p * (1.0 + single / own * (size + lse[..., None]))
    largest = jnp.abs(scale) * jnp.einsum("btnh,bsnh->bnts", jnp.abs(q), jnp.abs(k)).max(-1)
    o = jnp.einsum("bnts,bsnh->btnh", p, jnp.abs(v))
    lse_floor = 1.0 + lse + largest + size.max(-1)
    return checks.FLOOR * own * o, checks.LSE_FLOOR * single * lse_floor


def assert_close(got, near, right, floor):
    """Checks that `got` is as near to `right` as plain jnp's `near` demands; see checks.py."""
    errors = (checks._error(np.asarray(x).astype(np.float64), right) for x in (got, near))
    found, allowed, least = (checks._sizes(x) for x in (*errors, floor))
    for e, a, s in zip(found, allowed, least, strict=True):
        limit = checks.OUTPUT_FACTOR * a + s
        assert e <= limit, f"error {e:.3g}, allowed {limit:.3g}"


def test_a_query_without_keys_is_zero():
    q, kv, _, _, arguments = Step(T=4).draw()
    o, lse = fp.flash_decode(q, *kv, return_lse=True, **arguments)
    assert (o[0] == 0).all() and (lse[0] == -jnp.inf).all()
    # The only key of the second sequence is that of its last query.
    assert (o[1, :3] == 0).all() and (lse[1, :, :3] == -jnp.inf).all()
    assert jnp.isfinite(lse[1, :, 3]).all()


def test_float64():
    with jax.enable_x64(True):
        step = Step(T=2, dtype="float64")
        q, kv, _, _, arguments = step.draw()
        o, lse = fp.flash_decode(q, *kv, return_lse=True, num_splits=2, **arguments)
        right = jax.jit(dense(reference.attention, step, arguments))(q, *kv)
        assert o.dtype == lse.dtype == jnp.float64
        np.testing.assert_allclose(o, right[0], rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(lse, right[1], rtol=1e-12)


def test_pages_and_contiguous_caches_give_the_same_bits():
    q, kv, pages, table, arguments = Step(T=2, pages="repeated").draw()
    paged = fp.flash_decode(q, *pages, page_table=table, **arguments)
    assert (paged == fp.flash_decode(q, *kv, **arguments)).all()


def test_traced_lengths_and_tables_do_not_compile_anew():
    q, _, pages, table, arguments = Step().draw()
    traces = []

    @jax.jit
    def step(arguments):
        traces.append(1)
        return fp.flash_decode(q, *pages, **arguments)

    first = step(arguments | {"page_table": table})
    shorter = {"kv_lengths": jnp.minimum(arguments["kv_lengths"], 100)}
    other = step(shorter | {"page_table": table + 0})
    assert len(traces) == 1 and (first[-1] != other[-1]).any() and (first[1] == other[1]).all()


def test_the_cache_is_not_copied():
    q, k = jnp.zeros((1, 1, 2, 32)), jnp.zeros((64, 256, 1, 32))
    table = jnp.arange(64, dtype=jnp.int32)[None]
    run = jax.jit(lambda q, k, v, n: fp.flash_decode(q, k, v, kv_lengths=n, page_table=table))
    for call in (
        run.lower(q, k, k, 9),
        jax.jit(fp.flash_decode).lower(q, *[k.reshape(1, -1, 1, 32)] * 2),
    ):
        assert call.compile().memory_analysis().temp_size_in_bytes < k.nbytes / 4


def test_vmap_and_scalars():
    q, kv = Step(T=2).draw()[:2]
    k, v = (jnp.nan_to_num(x) for x in kv)
    one = lambda q, k, v: fp.flash_decode(q[None], k[None], v[None], kv_lengths=77, q_offset=75)[0]
    together = fp.flash_decode(q, k, v, kv_lengths=jnp.full(B, 77))
    np.testing.assert_allclose(jax.vmap(one)(q, k, v), together, rtol=1e-5, atol=1e-6)


def test_shard_map_over_the_batch(devices):
    q, kv, _, _, arguments = Step(T=2, sides=("alibi",)).draw()
    mesh = jax.sharding.Mesh(np.array(devices[:2]), "data")
    rows, slopes = jax.P("data"), arguments["alibi_slopes"]
    call = lambda q, k, v, n, a: fp.flash_decode(q, k, v, kv_lengths=n, alibi_slopes=a)
    spread = jax.shard_map(call, mesh=mesh, in_specs=(rows,) * 4 + (jax.P(),), out_specs=rows)
    given = (q, *kv, arguments["kv_lengths"], slopes)
    np.testing.assert_allclose(jax.jit(spread)(*given), jax.jit(call)(*given), rtol=1e-5, atol=1e-6)


def test_there_is_no_derivative():
    q, kv = Step().draw()[:2]
    with pytest.raises(NotImplementedError, match="flash_decode has no derivative: use flash_att"):
        jax.grad(lambda q: fp.flash_decode(q, *kv).sum())(jnp.asarray(q))
    with pytest.raises(NotImplementedError, match="flash_decode has no derivative"):
        jax.jvp(lambda q: fp.flash_decode(q, *kv), (q,), (q,))


def test_a_derivative_that_is_stopped_need_not_exist():
    q, kv = Step().draw()[:2]
    loss = lambda q: jnp.sum(q**2) + jnp.sum(jax.lax.stop_gradient(fp.flash_decode(q, *kv)))
    for gradient in (jax.grad(loss), jax.jit(jax.grad(loss))):
        np.testing.assert_array_equal(gradient(q), 2 * q)


@dataclasses.dataclass(frozen=True)
class Picky(XlaBackend):
    """A backend that does not decode."""

    name = "picky"
    decode = Refused("it is Monday")


def test_a_named_backend_never_falls_back(monkeypatch):
    monkeypatch.setattr(dispatch, "BACKENDS", {"picky": Picky(), "xla": XlaBackend()})
    q, k = jnp.ones((1, 1, 2, 16)), jnp.ones((1, 64, 1, 16))
    message = "backend='picky': it is Monday; backend='auto' or 'xla' can run this call"
    with pytest.raises(fp.UnsupportedByBackend, match=message):
        fp.flash_decode(q, k, k, backend="picky")
    with pytest.raises(fp.UnsupportedByBackend, match=message):
        fp.explain(fp.flash_decode, q, k, k, backend="picky")
    found = fp.explain(fp.flash_decode, q, k, k)
    assert found.backend == "xla" and found.reasons == {"picky": "it is Monday"}
    assert "flash_decode on q [1, 1, 2, 16], k [1, 64, 1, 16]" in str(found)
    paged = fp.explain(
        fp.flash_decode, q, k, k, page_table=jnp.zeros((1, 3), jnp.int32), kv_lengths=3
    )
    assert "k [1, 64, 1, 16]" in str(paged) and paged.blocks.block_kv == 128
    with pytest.raises(ValueError, match="backend is 'fast': choose one of"):
        fp.flash_decode(q, k, k, backend="fast")


def array(*shape, dtype=jnp.float32):
    return jnp.ones(shape, dtype)


Q, K, PAGES = array(2, 1, 4, 16), array(2, 8, 2, 16), array(5, 32, 2, 16)
TABLE = {"page_table": jnp.zeros((2, 3), jnp.int32)}
PAGED = TABLE | {"kv_lengths": jnp.array([3, 96])}
BAD = {
    "rank": ((Q[:, 0], K, K), {}, ValueError, r"rank 4, got q \(2, 4, 16\).*q\[:, None\]"),
    "batch": ((Q, K[:1], K), {}, ValueError, "batch sizes of q, k and v differ"),
    "pages": ((Q, PAGES, PAGES[:4]), PAGED, ValueError, "pages of k and v differ"),
    "tokens": ((array(2, 65, 4, 16), K, K), {}, ValueError, "65 tokens.*1 to 64.*flash_attention"),
    "no tokens": ((array(2, 0, 4, 16), K, K), {}, ValueError, "q has 0 tokens"),
    "no pages": (
        (Q, PAGES[:0], PAGES[:0]),
        {"page_table": jnp.zeros((2, 1), int), "kv_lengths": 0},
        ValueError,
        "no page.*at least one",
    ),
    "heads": ((array(2, 1, 3, 16), K, K), {}, ValueError, "3 heads and k 2.*multiple"),
    "head dim": ((Q, K[..., :8], K), {}, ValueError, "head_dim 16 and k head_dim 8"),
    "dtypes": ((Q, K.astype("bfloat16"), K), {}, TypeError, "one dtype.*k bfloat16"),
    "list": (([1.0], K, K), {}, TypeError, "q must be an array, got list"),
    "lengths": ((Q, K, K), {"kv_lengths": array(2)}, TypeError, "kv_lengths has dtype float32"),
    "lengths shape": (
        (Q, K, K),
        {"kv_lengths": jnp.ones(3, jnp.int32)},
        ValueError,
        r"kv_lengths has shape \(3,\): it must be one per batch entry, \(2,\)",
    ),
    "offset": ((Q, K, K), {"q_offset": 1.5}, TypeError, "q_offset must be an int"),
    "window": ((Q, K, K), {"window": -1}, ValueError, "window is -1.*at least 0"),
    "softcap": ((Q, K, K), {"softcap": 0.0}, ValueError, "softcap must be finite and positive"),
    "sinks": ((Q, K, K), {"sinks": array(3)}, ValueError, r"sinks has shape \(3,\)"),
    "splits": ((Q, K, K), {"num_splits": 0}, ValueError, "num_splits is 0: it must be 1 to 128"),
    "many splits": ((Q, K, K), {"num_splits": 129}, ValueError, "num_splits is 129"),
    "splits str": ((Q, K, K), {"num_splits": "all"}, TypeError, "an int or 'auto', got 'all'"),
    "splits bool": ((Q, K, K), {"num_splits": True}, TypeError, "an int or 'auto', got True"),
    "splits array": ((Q, K, K), {"num_splits": jnp.ones(2)}, TypeError, "num_splits.*static"),
    "return_lse": ((Q, K, K), {"return_lse": 1}, TypeError, "return_lse must be a bool, got 1"),
    "pages without lengths": ((Q, PAGES, PAGES), TABLE, ValueError, "kv_lengths is None.*page_tab"),
    "page size": ((Q, K, K), PAGED, ValueError, "pages of 8 keys.*multiple of 16 from 16 to 256"),
    "table dtype": (
        (Q, PAGES, PAGES),
        PAGED | {"page_table": array(2, 3)},
        TypeError,
        r"page_table has dtype float32.*astype\(jnp.int32\)",
    ),
    "table shape": (
        (Q, PAGES, PAGES),
        PAGED | {"page_table": jnp.zeros((3, 3), jnp.int32)},
        ValueError,
        r"page_table has shape \(3, 3\): it must be \[batch, max_pages\].*2 sequences",
    ),
}


def test_no_sequence_and_no_room_give_empty_results():
    sinks = jnp.arange(Q.shape[2], dtype=jnp.float32)
    for call in (fp.flash_decode, jax.jit(fp.flash_decode)):
        assert call(Q[:0], K[:0], K[:0, ..., :8]).shape == (0, *Q.shape[1:-1], 8)
    table = jnp.zeros((0, 3), jnp.int32)
    paged = {"page_table": table, "kv_lengths": jnp.zeros(0, jnp.int32)}
    assert fp.flash_decode(Q[:0], PAGES, PAGES, **paged).shape == Q[:0].shape
    for given, wanted in ((None, jnp.full_like(sinks, -jnp.inf)), (sinks, sinks)):
        o, lse = fp.flash_decode(Q, K[:, :0], K[:, :0], sinks=given, return_lse=True)
        assert o.shape == Q.shape and not o.any()
        np.testing.assert_array_equal(lse, jnp.broadcast_to(wanted[:, None], lse.shape))


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name):
    arrays, options, error, message = BAD[name]
    with pytest.raises(error, match=message):
        fp.flash_decode(*arrays, **options)
