"""Prefixes that sequences share: the results of decoding without sharing, and what is read once."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import flash_pallas as fp
from flash_pallas import reference
from flash_pallas.backends.hopper import HopperBackend
from flash_pallas.core import decode, shared_prefix
from flash_pallas.frontend import dispatch

from . import checks
from .interpreter import race_checked
from .test_decode import assert_close, terms

PAGE, PAGES, COLUMNS = 16, 96, 8
# Groups, their common pages, and the keys of each sequence: one group with a system prompt of three
# pages, one of two pages whose last member ends inside the second, one sequence that shares its
# first page with nobody, one without keys.
GROUPS = (((100, 77, 128, 60, 55), 3), ((90, 33, 70), 2), ((64,), 0), ((0,), 0))
LENGTHS = np.array([x for lengths, _ in GROUPS for x in lengths], np.int32)
B = len(LENGTHS)


def drawn(T: int = 1, dtype="float32", heads: tuple[int, int] = (4, 2), dims=(32, 32), seed=0):
    """Draws (q, pages of k, pages of v, arguments); the sequences are in a random order."""
    rng = np.random.default_rng(seed)
    table = rng.permutation(PAGES)[: B * COLUMNS].reshape(B, COLUMNS).astype(np.int32)
    first = 0
    for lengths, common in GROUPS:
        table[first : first + len(lengths), :common] = table[first, :common]
        first += len(lengths)
    order = rng.permutation(B)
    table, lengths = table[order], LENGTHS[order]
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), dtype)
    q = normal(B, T, heads[0], dims[0])
    k, v = (np.array(normal(PAGES, PAGE, heads[1], width)) for width in dims)
    for row, length in zip(table, lengths, strict=True):  # what lies past the keys
        last = length // PAGE
        if last < COLUMNS:
            shared = np.sum(table == row[last]) > 1
            if not shared:
                k[row[last], length % PAGE :] = v[row[last], length % PAGE :] = np.nan
            row[last + 1 :] = rng.choice([-1, 2**31 - 1, PAGES], COLUMNS - last - 1)
    given: dict[str, Any] = {"kv_lengths": lengths, "page_table": table}
    return q, jnp.asarray(k), jnp.asarray(v), jax.tree.map(jnp.asarray, given)


def contiguous(x, given):
    """Returns the keys of the pages, with zeros past the end of each sequence."""
    found = jnp.take(x, given["page_table"], axis=0, mode="clip").reshape(B, -1, *x.shape[2:])
    valid = jnp.arange(found.shape[1])[None] < given["kv_lengths"][:, None]
    return jnp.where(valid[:, :, None, None], found, 0)


@pytest.mark.thorough
@pytest.mark.parametrize(("T", "dtype"), [(1, "float32"), (3, "bfloat16")])
def test_the_oracle(T, dtype):
    assert_right("xla", *drawn(T, dtype), num_splits=2)


def assert_right(backend: str, q, k, v, given, **options):
    """Checks decoding with shared prefixes against the oracle."""
    T, heads = q.shape[1:3]
    modifiers = {"softcap": 3.0, "sinks": jnp.linspace(-1.0, 1.0, heads)}
    options |= {"backend": backend, "shared_prefix": "auto", "return_lse": True}
    decode = partial(fp.flash_decode, softcap=modifiers["softcap"], **options)
    found = jax.jit(decode)(q, k, v, sinks=modifiers["sinks"], **given)
    kv = contiguous(k, given), contiguous(v, given)
    options = modifiers | {"kv_lengths": given["kv_lengths"], "causal": True}
    options |= {"q_offset": given["kv_lengths"] - T}
    plain = checks.plain(q, *kv, **options)
    with jax.enable_x64(True):
        wide: list[Any] = [np.asarray(x).astype(np.float64) for x in (q, *kv)]
        exact = reference.attention(*wide, **options)
        of_o, of_lse = map(np.asarray, terms(q.dtype, *wide, **options))
    if backend != "xla":
        of_lse = of_lse + checks.TANH_ERROR * modifiers["softcap"]
    for got, near, right, floor in zip(found, plain, exact, (of_o, of_lse), strict=True):
        assert_close(got, near, np.asarray(right), floor)


def as_operands(q, k, v, given, **more):
    return decode.DecodeOperands(
        q, k, v, given["kv_lengths"], None, page_table=given["page_table"], **more
    )


@pytest.fixture
def small_tiles(monkeypatch):
    monkeypatch.setattr(shared_prefix, "MAX_TOKENS", 16)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("T", [1, 8])
def test_groups(T):
    q, k, v, given = drawn(T)
    share = jax.jit(shared_prefix.sharing, static_argnums=1)
    found = share(as_operands(q, k, v, given), T)
    tables, lengths = np.asarray(given["page_table"]), np.asarray(given["kv_lengths"])
    seen = {}
    for b in range(B):
        tile, keys = int(found.tile[b]), int(found.prefix[b])
        same = np.flatnonzero((tables[:, 0] == tables[b, 0]) & (lengths - T >= PAGE))
        if lengths[b] - T < PAGE or len(same) < 2:
            assert keys == 0 and tile == len(found.members)
            continue
        room = min((lengths[same] - T) // PAGE)
        agreed = (tables[same] == tables[b]).all(0)
        assert keys == PAGE * min(room, agreed.tolist().index(False))
        assert found.members[tile, found.slot[b]] == b
        assert found.lengths[tile] == keys
        assert (tables[found.leaders[tile], : keys // PAGE] == tables[b, : keys // PAGE]).all()
        seen.setdefault(tile, []).append(b)
    sizes = sorted(len(x) for x in seen.values())
    assert sizes == ([3, 5] if T == 1 else [1, 1, 2, 2, 2])
    assert sorted(seen) == list(range(len(seen)))
    assert np.asarray(found.lengths)[len(seen) :].sum() == 0


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("T", [1, 8])
def test_all_groups_have_tiles(T):
    """Checks groups of every size: of two and three, and of one more than a tile has room for."""
    share = jax.jit(shared_prefix.sharing, static_argnums=1)
    for size in (2, 3, 16 // T + 1):
        table = jnp.minimum(jnp.arange(30, dtype=jnp.int32) // size, 30 // size - 1)[:, None]
        x, q = jnp.zeros((3, 16, 1, 16)), jnp.zeros((30, T, 1, 16))
        given = {"kv_lengths": jnp.full(30, 16 + T), "page_table": jnp.tile(table, (1, 2))}
        found = share(as_operands(q, x, x, given), T)
        assert (found.prefix == 16).all() and (found.tile < len(found.members)).all()
        assert len(set(zip(found.tile.tolist(), found.slot.tolist(), strict=True))) == 30


@pytest.mark.thorough(always=["2"])
@pytest.mark.parametrize("seed", range(8))
def test_random_tables(seed):
    """Checks tables of few pages, many of which agree somewhere, against decoding one by one."""
    rng = np.random.default_rng(seed)
    batch, columns = int(rng.integers(1, 12)), int(rng.integers(1, 6))
    table = rng.integers(0, 3, (batch, columns)).astype(np.int32)
    lengths = rng.integers(0, columns * PAGE + 9, batch).astype(np.int32)
    q, k, v = (
        jnp.asarray(rng.standard_normal(s), jnp.float32)
        for s in ((batch, 1, 2, 16), (3, PAGE, 1, 16), (3, PAGE, 1, 16))
    )
    options = {"page_table": table, "return_lse": True}
    call = jax.jit(partial(fp.flash_decode, q, k, v, **options), static_argnames="shared_prefix")
    found, right = (call(kv_lengths=lengths, shared_prefix=x) for x in ("auto", None))
    for got, near in zip(found, right, strict=True):
        np.testing.assert_allclose(got, near, rtol=2e-5, atol=2e-5)


def test_lengths_that_are_given_are_trusted():
    q, k, v, given = drawn()
    same = fp.flash_decode(q, k, v, **given)
    keys = shared_prefix.sharing(as_operands(q, k, v, given), 1).prefix
    for lengths in (keys, jnp.minimum(keys, PAGE), keys + 7, 0):
        found = fp.flash_decode(q, k, v, shared_prefix=lengths, **given)
        np.testing.assert_allclose(found, same, rtol=1e-5, atol=1e-5)
    told = shared_prefix.sharing(as_operands(q, k, v, given, prefix_lengths=keys // 2), 1)
    assert (told.prefix <= keys // 2).all() and (told.prefix % PAGE == 0).all()


@pytest.mark.parametrize("rows", [1, PAGES], ids=["heads", "pages"])
def test_eight_bits_and_latent_values(rows):
    q, k, _, given = drawn()
    k = jnp.clip(jnp.nan_to_num(jnp.round(k * 40)), -127, 127).astype(jnp.int8)
    scale = jnp.linspace(0.01, 0.03, rows)[:, None] * jnp.ones((1, 2))
    given |= {"k_scale": scale[0] if rows == 1 else scale, "v_head_dim": 24}
    found = fp.flash_decode(q, k, shared_prefix="auto", **given)
    np.testing.assert_allclose(found, fp.flash_decode(q, k, **given), rtol=2e-5, atol=2e-5)


def test_under_vmap_and_jit():
    q, k, v, given = drawn()
    call = lambda q, k, v: fp.flash_decode(q, k, v, shared_prefix="auto", **given)
    found = jax.jit(jax.vmap(call))(*(jnp.stack([x, 2 * x]) for x in (q, k, v)))
    np.testing.assert_allclose(found[1], call(2 * q, 2 * k, 2 * v), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_heads_on_a_mesh(devices, kind):
    q, k, v, given = drawn()
    right = fp.flash_decode(q, k, v, **given)
    mesh = jax.make_mesh((2,), ("model",), axis_types=(kind,), devices=devices[:2])
    cut = NamedSharding(mesh, P(None, None, "model"))
    with jax.set_mesh(mesh):
        q, k, v = (jax.device_put(x, cut) for x in (q, k, v))
        call = lambda q, k, v: fp.flash_decode(q, k, v, shared_prefix="auto", **given)
        found = jax.jit(call)(q, k, v)
    np.testing.assert_allclose(found, right, rtol=1e-5, atol=1e-5)


def test_steps_of_a_ragged_call():
    """Checks steps that share prefixes with each other, next to a chunk with the same pages."""
    q, k, v, given = drawn()
    longest = int(jnp.argmax(given["kv_lengths"]))
    counts = np.where(np.arange(B) == longest, 9, 1) * (np.asarray(given["kv_lengths"]) > 0)
    given["cu_q_lens"] = jnp.asarray(np.cumsum([0, *counts]), jnp.int32)
    q = jax.random.normal(jax.random.key(0), (counts.sum() + 3, 4, 32))
    call = jax.jit(fp.ragged_paged_attention, static_argnames=("shared_prefix", "return_lse"))
    right = call(q, k, v, return_lse=True, **given)
    found = call(q, k, v, return_lse=True, shared_prefix="auto", **given)
    for got, near in zip(found, right, strict=True):
        np.testing.assert_allclose(got, near, rtol=2e-5, atol=2e-5)
    assert "shared prefixes" in str(
        fp.explain(fp.ragged_paged_attention, q, k, v, shared_prefix="auto", **given)
    )
    with pytest.raises(ValueError, match="step_tokens is 33: it must be 1 to 32"):
        fp.ragged_paged_attention(q, k, v, shared_prefix="auto", step_tokens=33, **given)


def test_trees_of_drafts():
    q, k, v, given = drawn(4)
    tree = jnp.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], bool)
    found = fp.flash_decode(q, k, v, draft_mask=tree, shared_prefix="auto", **given)
    right = fp.flash_decode(q, k, v, draft_mask=tree, **given)
    np.testing.assert_allclose(found, right, rtol=2e-5, atol=2e-5)


Q, K = jnp.zeros((2, 1, 4, 32)), jnp.zeros((8, 16, 2, 32))
TABLE = jnp.zeros((2, 4), jnp.int32)
REFUSED = {
    "word": ({"shared_prefix": "yes"}, ValueError, "shared_prefix is 'yes': it must be 'auto'"),
    "shape": ({"shared_prefix": jnp.zeros(3, jnp.int32)}, ValueError, "shared_prefix has shape"),
    "dtype": ({"shared_prefix": jnp.zeros(2)}, TypeError, "shared_prefix has dtype float32"),
    "window": ({"window": 5}, ValueError, "shared_prefix is given and so is window"),
    "starts": ({"kv_starts": 5}, ValueError, "shared_prefix is given and so is kv_starts"),
    "tokens": ({"q": jnp.zeros((2, 33, 4, 32))}, ValueError, "q has 33 tokens: it must be 1 to 32"),
    "contiguous": (
        {"page_table": None, "k": jnp.zeros((2, 64, 2, 32))},
        ValueError,
        "page_table is None: sequences share pages",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name):
    options, error, message = REFUSED[name]
    given = {"q": Q, "k": K, "page_table": TABLE, "kv_lengths": 40, "shared_prefix": "auto"}
    given |= options
    with pytest.raises(error, match=message):
        fp.flash_decode(v=given["k"], **given)


def test_explain_says_so():
    given = {"page_table": TABLE, "kv_lengths": 40, "backend": "xla"}
    assert "shared prefixes" in str(
        fp.explain(fp.flash_decode, Q, K, K, shared_prefix="auto", **given)
    )
    assert "shared prefixes" not in str(fp.explain(fp.flash_decode, Q, K, K, **given))


TREE = jnp.array([[1, 0], [1, 1]], bool)
ON_HOPPER = {
    "one_token": (1, {}),
    "sinks": (1, {"sinks": jnp.linspace(-1.0, 1.0, 4)}),
    "drafts": (2, {"draft_mask": TREE}),
    "splits": (1, {"num_splits": 3}),
}


@pytest.mark.interpret
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.thorough
@pytest.mark.parametrize("name", ON_HOPPER)
def test_hopper(monkeypatch, name):
    """Checks three sequences that share, and one that does not, whose NaN nobody else may see."""
    T, options = ON_HOPPER[name]
    q, k, v, given = drawn(T, "bfloat16", dims=(64, 64))
    size, longest = jnp.sum(found := shares(q, k, v, given)), jnp.argsort(-given["kv_lengths"])
    some = jnp.concatenate([longest[~found[longest]][:1], longest[found[longest]][:3]])
    assert size >= 3
    q, given = q[some].at[0].set(jnp.nan), {name: x[some] for name, x in given.items()}
    given |= options
    right = fp.flash_decode(q, k, v, backend="xla", return_lse=True, **given)
    backends = {"hopper": HopperBackend(interpret=True, num_sms=2)}
    monkeypatch.setattr(dispatch, "BACKENDS", backends)
    with race_checked():
        found = fp.flash_decode(q, k, v, shared_prefix="auto", return_lse=True, **given)
    for got, near, most in zip(found, right, (0.02, 0.01), strict=True):
        np.testing.assert_allclose(*(np.float32(x)[1:] for x in (got, near)), rtol=most, atol=most)


@pytest.mark.interpret
@pytest.mark.thorough
@pytest.mark.parametrize("splits", ["auto", 2])
def test_packed_steps_on_hopper(monkeypatch, splits):
    """Checks steps that share among packed rows, next to a chunk with the same pages."""
    q, k, v, given = drawn(1, "bfloat16", dims=(64, 64))
    found = np.asarray(shares(q, k, v, given))
    some = np.concatenate([np.flatnonzero(~found)[:1], np.flatnonzero(found)[:3]])
    lengths = np.asarray(given["kv_lengths"])[some]
    counts = np.array([min(7, lengths[0]), 1, 1, 0])
    assert counts[0] > 1 and (lengths[1:] > PAGE).all()
    given = {"kv_lengths": lengths, "page_table": given["page_table"][some], "num_splits": splits}
    given["cu_q_lens"] = jnp.asarray(np.cumsum([0, *counts]), jnp.int32)
    q = jax.random.normal(jax.random.key(0), (int(counts.sum()) + 3, 4, 64), jnp.bfloat16)
    right = fp.ragged_paged_attention(q, k, v, backend="xla", return_lse=True, **given)
    backends = {"hopper": HopperBackend(interpret=True, num_sms=2)}
    monkeypatch.setattr(dispatch, "BACKENDS", backends)
    call = partial(fp.ragged_paged_attention, shared_prefix="auto", return_lse=True)
    with race_checked():
        found = call(q, k, v, **given)
    for got, near, most in zip(found, right, (0.02, 0.01), strict=True):
        rows = [np.float32(x)[: counts.sum()] for x in (got, near)]
        np.testing.assert_allclose(*rows, rtol=most, atol=most)


def shares(q, k, v, given):
    """Returns bool[B], which sequences share a prefix."""
    return shared_prefix.sharing(as_operands(q, k, v, given), q.shape[1]).prefix > 0
