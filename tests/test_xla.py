"""Promises of the fallback beyond the numbers: its memory, and what does not change them."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flash_pallas as fp
from flash_pallas.backends.xla.backend import XlaBackend
from flash_pallas.core import dropout
from flash_pallas.core.mask import Mask
from flash_pallas.core.problem import AttentionSpec, Operands, describe

from . import checks
from .cases import Case, named

SMALL_BLOCKS = {"block_q": 32, "block_kv": 16}


def shapes(jaxpr):
    """Yields (primitive, shape) of all values in a jaxpr, those in loops and calls included."""
    for eqn in jaxpr.eqns:
        yield from ((eqn.primitive.name, tuple(x.aval.shape)) for x in eqn.outvars)
        for inner in jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from shapes(inner)


def gradient_shapes(case, wanted):
    x = case.inputs()
    call = checks.bind("xla", SMALL_BLOCKS)

    def loss(given):
        side = x.side | {name: y for name, y in given.items() if name != "q"}
        arguments = case.arguments(x._replace(side=side))
        return call(given["q"], x.k, x.v, **arguments)[0].astype(jnp.float32).sum()

    given = {name: x.side.get(name, x.q) for name in ("q", *wanted)}
    return list(shapes(jax.make_jaxpr(jax.grad(loss))(given).jaxpr))


@pytest.mark.parametrize("bias", ["1NTS", "B1TS", "11TS", "BN1S", "BNT1", "1N1S", "1111"])
@pytest.mark.parametrize("mask", ["B1TS", None])
def test_no_array_of_all_scores_is_ever_made(bias, mask):
    case = Case("memory", T=160, S=144, B=3, N=4, K=2, H=8, bias=bias, mask=mask)
    case = dataclasses.replace(case, segments="packed", dropout_rate=0.1, score_mod="per_entry")
    scores = case.B * case.N * case.T * case.S
    found = gradient_shapes(case, ("bias", "captured"))
    assert len(found) > 100
    largest = max(found, key=lambda x: np.prod(x[1], dtype=int))
    assert np.prod(largest[1], dtype=int) <= scores / 3, largest


def test_one_query_reads_the_keys_where_they_lie():
    """Checks that keys whose length no tile divides are neither padded nor transposed whole."""
    q, (k, v) = jnp.ones((1, 1, 8, 64)), jnp.ones((2, 1, 1000, 4, 64))
    call = lambda q, k, v: fp.dot_product_attention(q, k, v, implementation="xla")
    found = list(shapes(jax.make_jaxpr(call)(q, k, v).jaxpr))
    assert len(found) > 100
    assert max(np.prod(shape, dtype=int) for _, shape in found) < k.size


@pytest.mark.parametrize(
    ("batch", "heads", "length", "causal", "expected"),
    [
        (1, 4, 8192, False, (8192, 8192)),
        (1, 4, 8192, True, (8192, 8192)),
        (4, 16, 4096, False, (1024, 4096)),
        (4, 16, 4096, True, (2048, 2048)),
        (2, 32, 131072, False, (2048, 2048)),  # rows of all keys would be 32 high
        (64, 64, 4096, True, (256, 256)),
        (512, 512, 4096, True, (128, 128)),  # the least
        (1, 1, 70, False, (70, 70)),
    ],
)
def test_scores_of_a_tile_take_at_most_a_gibibyte(
    monkeypatch, batch, heads, length, causal, expected
):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    x = jax.ShapeDtypeStruct((batch, length, heads, 64), jnp.bfloat16)
    spec = AttentionSpec(scale=1.0, mask=Mask(right=0 if causal else None))
    blocks = XlaBackend().attention.plan(describe(Operands(x, x, x), spec), None)
    assert (blocks.block_q, blocks.block_kv) == expected


def test_the_walk_finds_what_is_inside_loops():
    body = lambda i, x: (x[:, None] * x[None]).sum(0)
    jaxpr = jax.make_jaxpr(lambda x: jax.lax.fori_loop(0, x.size, body, x))(jnp.ones(7))
    assert ("mul", (7, 7)) in shapes(jaxpr.jaxpr)


def test_the_gradient_of_a_bias_costs_nothing_where_nobody_asks():
    case = Case("bias", T=96, S=96, B=2, N=2, H=8, bias="1NTS")
    written = ("dynamic_update_slice", (1, 2, 96, 96))
    assert written in gradient_shapes(case, ("bias",))
    assert written not in gradient_shapes(case, ())


@pytest.mark.parametrize("name", ["length_129_causal", "gqa"])
def test_features_that_are_off_leave_no_trace(name):
    (case,) = named(name)
    found = gradient_shapes(case, ())
    primitives = {primitive for primitive, _ in found}
    assert "exp2" in primitives
    assert not primitives & {"tanh", "xor", "shift_right_logical"}
    # Of a tile it is ALiBi's distance; of rows, [B, K, G, block_q], that of their largest logit.
    assert all(len(shape) == 4 for primitive, shape in found if primitive == "abs")


@pytest.mark.thorough(always=["entries1"])
@pytest.mark.parametrize("entries", [(2, 1), (1, 3), (2, 3)])
def test_a_bias_shared_by_part_of_the_batch(entries):
    batch, n, t, s, h = (2, 3), 2, 40, 50, 8
    draw = lambda *shape: jnp.asarray(np.random.default_rng(len(shape)).standard_normal(shape))
    q, k, v = (draw(*batch, length, n, h).astype(jnp.float32) for length in (t, s, s))
    bias = draw(*entries, 1, t, s).astype(jnp.float32)
    mask = draw(*entries, n, 1, s) > -1.0

    def run(q, bias, mask):
        out = lambda *x: fp.flash_attention(*x[:1], k, v, bias=x[1], mask=mask, backend="xla")
        o, pull = jax.vjp(out, q, bias)
        return o, *pull(jnp.cos(o))

    whole = lambda x: jnp.broadcast_to(x, (*batch, *x.shape[2:]))
    o, dq, dbias = run(q, bias, mask)
    expected, expected_dq, each = run(q, whole(bias), whole(mask))
    axes = tuple(i for i in (0, 1) if entries[i] == 1)
    summed = each.sum(axes, keepdims=True) if axes else each
    for found, exact in ((o, expected), (dq, expected_dq), (dbias, summed)):
        np.testing.assert_allclose(found, exact, rtol=1e-5, atol=1e-5)


def test_packed_documents_are_separate_calls():
    case = Case("packed", T=70, S=70, B=1, K=1, segments="packed", causal=True)
    x = case.inputs()
    call = checks.bind("xla", SMALL_BLOCKS)
    o, lse = call(x.q, x.k, x.v, **case.arguments(x))
    ids = np.asarray(x.given["q_segment_ids"])[0]
    assert len(np.unique(ids)) > 2
    for document in np.unique(ids):
        rows = np.flatnonzero(ids == document)
        alone, alone_lse = call(*(a[:, rows] for a in (x.q, x.k, x.v)), causal=True)
        np.testing.assert_allclose(o[:, rows], alone, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(lse[..., rows], alone_lse, rtol=1e-5, atol=1e-6)


@pytest.mark.thorough(always=["bias_lengths"])
@pytest.mark.parametrize("name", ["lengths_padded", "bias_lengths", "sinks_lengths"])
def test_what_padding_holds_changes_no_bit(name):
    poisoned = dataclasses.replace(*named(name), poison=True)
    harmless = dataclasses.replace(poisoned, poison=False)
    found = checks.run(checks.bind("xla", SMALL_BLOCKS), poisoned)
    expected = checks.run(checks.bind("xla", SMALL_BLOCKS), harmless)
    for field in expected:
        np.testing.assert_array_equal(found[field], expected[field], err_msg=field)


@pytest.mark.thorough(always=["True-blocks1", "False-blocks1", "True-None"])
@pytest.mark.parametrize("blocks", [None, SMALL_BLOCKS, {"block_q": 7, "block_kv": 70}])
@pytest.mark.parametrize("broadcast", [False, True])
def test_the_weights_that_dropout_keeps_can_be_read_off(blocks, broadcast):
    """Checks the dropout mask: with equal scores and one-hot values the output is the mask."""
    batch, heads, length, rate = 2, 3, 70, 0.4
    zeros = jnp.zeros((batch, length, heads, 8))
    v = jnp.broadcast_to(jnp.eye(length)[None, :, None], (batch, length, heads, length))
    o = fp.flash_attention(
        zeros, zeros, v, dropout_rate=rate, dropout_seed=5, broadcast_dropout=broadcast,
        q_offset=-11, backend="xla", blocks=blocks,
    )  # fmt: skip
    sizes = (1, 1) if broadcast else (batch, heads)
    keys = dropout.call_keys(dropout.seed_words(5), *sizes)
    place = jnp.arange(length, dtype=jnp.int32)
    kept = dropout.keep(
        keys[..., None, None], place[None, None, :, None] - 11, place[None, None, None], rate
    )
    expected = np.broadcast_to(kept, (batch, heads, length, length)).transpose(0, 2, 1, 3)
    np.testing.assert_array_equal(o != 0, expected)
    np.testing.assert_allclose(o[o != 0], dropout.gain(rate) / length, rtol=1e-6)
