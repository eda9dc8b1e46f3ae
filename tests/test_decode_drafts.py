"""flash_decode with a draft mask: trees of proposals and other masks, on every backend."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flash_pallas as fp
from flash_pallas.backends.gpu.ptx import draft_bits
from flash_pallas.backends.hopper import HopperBackend
from flash_pallas.backends.portable import PortableBackend
from flash_pallas.backends.xla import XlaBackend
from flash_pallas.backends.xla import decode as xla_decode
from flash_pallas.core import decode, drafts, softmax
from flash_pallas.core.mask import DraftMask
from flash_pallas.frontend import dispatch

from . import draft_masks, ptx
from .checks import explain_on
from .hopper_decode_cases import Step, assert_matches_oracle
from .interpreter import race_checked

XLA = XlaBackend()


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(xla_decode, "BLOCK", 64)


def drawn(seed: int) -> Step:
    """Draws a step whose drafts lie anywhere among blocks, some of them before key 0."""
    rng = np.random.default_rng(seed)
    one = lambda *values: values[rng.integers(len(values))]
    tokens, batch = int(one(1, 5, 13, 32, 33, 64)), 3
    some = lambda most: tuple(int(one(0, 1, 63, 64, 65, rng.integers(most))) for _ in range(batch))
    return Step(
        f"drawn_{seed}",
        lengths=tuple(256 + seed % 2 * 9 - n for n in some(250)),  # 256 have room
        T=tokens,
        N=4,
        K=one(1, 2, 4),
        dtype=str(one("float16", "bfloat16", "float32")),
        page_size=one(None, 16, 64),
        num_splits=int(rng.integers(1, 6)),
        starts=some(300) if seed % 3 == 0 else None,
        window=int(one(0, 3, 20, 70)) if seed % 4 == 1 else None,
        windows=some(80) if seed % 4 == 2 else None,
        softcap=one(None, 3.0),
        sides=tuple(name for name in ("sinks", "slopes") if rng.integers(2)),
        drafts=draft_masks.KINDS[seed // 4],  # each with every kind of window
    )


@pytest.mark.thorough(always=["drawn_9"])
@pytest.mark.parametrize("step", [*map(drawn, range(16))], ids=str)
def test_xla(step):
    given, whole = step.operands()
    blocks = XLA.decode.plan(decode.describe(given, step.spec))
    run = jax.jit(lambda x: XLA.decode.run(step.spec, blocks, x))
    found = run(jax.tree.map(jnp.asarray, given))
    assert_matches_oracle(step, whole, (found.o, softmax.natural(found.lse_log2, found.shift)))


# --- what a mask means ----------------------------------------------------------------------------

PARENTS = (-1, 0, 0, 1, 1, 2, 4)
TREE = draft_masks.ancestors(PARENTS)
TOKENS, BATCH, LENGTH = len(PARENTS), 4, 96


def arrays() -> tuple[Any, ...]:
    """Draws (q, k, v, lengths) of four sequences, drafts included in the lengths."""
    rng = np.random.default_rng(0)
    sizes = ((TOKENS, 4), (LENGTH, 2), (LENGTH, 2))
    q, k, v = (rng.standard_normal((BATCH, *size, 32)).astype(np.float32) for size in sizes)
    return *map(jnp.asarray, (q, k, v)), jnp.array([90, 70, 64, TOKENS])


@pytest.mark.parametrize("name", ["window", "alibi_slopes"])
def test_a_branch_is_a_sequence(name):
    """Attends from each branch alone, with nothing of the others in the cache."""
    q, k, v, lengths = arrays()
    options = {"window": {"window": 2}, "alibi_slopes": {"alibi_slopes": jnp.full(4, 0.3)}}[name]
    attend = jax.jit(partial(fp.flash_decode, **options))
    found = attend(q, k, v, kv_lengths=lengths, draft_mask=jnp.asarray(TREE))
    first = np.asarray(lengths)[:, None] - TOKENS
    for leaf in (3, 5, 6):
        path = np.flatnonzero(TREE[leaf])
        depth = np.arange(LENGTH)[None] - first
        among = path[np.clip(depth, 0, len(path) - 1)] + first
        place = np.where(depth < 0, depth + first, among)[..., None, None]
        own = (np.take_along_axis(np.asarray(x), place, axis=1) for x in (k, v))
        right = attend(q[:, path], *own, kv_lengths=first[:, 0] + len(path))
        np.testing.assert_allclose(found[:, path], right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("diagonal", [0, np.arange(TOKENS) % 2], ids=["none", "some"])
def test_a_draft_need_not_see_itself(diagonal):
    """Compares with dense attention, where depths are the numbers of others that a draft sees."""
    q, k, v, lengths = arrays()
    mask = TREE.copy()
    np.fill_diagonal(mask, diagonal)
    slopes = jnp.full(4, 0.3)
    found = fp.flash_decode(
        q, k, v, kv_lengths=lengths, draft_mask=mask, window=2, alibi_slopes=slopes
    )
    depth = np.array([0, 1, 1, 2, 2, 2, 3])
    place = np.arange(LENGTH)[None] - (np.asarray(lengths)[:, None] - TOKENS)
    draft = np.clip(place, 0, TOKENS - 1)
    from_first = np.where(place < 0, place, depth[draft])  # the position of each key
    ahead = depth[None, :, None] - from_first[:, None]
    shown = (place < 0)[:, None] | np.moveaxis(mask[:, draft], 0, 1)
    shown &= (place < TOKENS)[:, None] & (ahead <= 2)
    bias = jnp.asarray(np.where(shown, -0.3 * np.abs(ahead), -1e30)[:, None], jnp.float32)
    right = jax.nn.dot_product_attention(q, k, v, bias)
    right = np.where(shown.any(-1)[..., None, None], right, 0.0)
    np.testing.assert_allclose(found, right, rtol=1e-5, atol=1e-5)


def test_64_causal_tokens():
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.standard_normal((1, n, 2, 32)), jnp.float32) for n in (64, 100))
    right = fp.flash_attention(q, k, k, causal=True, q_offset=36)
    for mask in (None, np.tri(64, dtype=bool)):
        found = fp.flash_decode(q, k, k, draft_mask=mask)
        np.testing.assert_allclose(found, right, rtol=1e-5, atol=1e-6)


def test_a_query_that_sees_nothing_is_zero():
    q, k, v, _ = arrays()
    none = np.zeros((TOKENS, TOKENS), bool)
    o, lse = fp.flash_decode(q, k, v, kv_lengths=TOKENS, draft_mask=none, return_lse=True)
    assert (o == 0).all() and (lse == -jnp.inf).all()


def test_masks_are_data():
    q, k, v, lengths = arrays()
    step = jax.jit(lambda mask: fp.flash_decode(q, k, v, kv_lengths=lengths, draft_mask=mask))
    each = np.stack([TREE, TREE.T, np.eye(TOKENS, dtype=bool), ~TREE])
    found = step(each)
    for b, mask in enumerate(each):
        np.testing.assert_allclose(found[b], step(np.stack([mask] * BATCH))[b], rtol=1e-6)
    assert step._cache_size() == 1
    shared = fp.flash_decode(q, k, v, kv_lengths=lengths, draft_mask=TREE)
    np.testing.assert_array_equal(shared, step(np.stack([TREE] * BATCH)))


def test_vmap_is_one_call_after_another():
    q, k, v, lengths = arrays()
    masks = jnp.stack([TREE, ~TREE])
    attend = lambda mask, q: fp.flash_decode(q, k, v, kv_lengths=lengths, draft_mask=mask)
    found = jax.vmap(attend, in_axes=(0, None))(masks, q)
    right = jnp.stack([attend(mask, q) for mask in masks])
    np.testing.assert_allclose(found, right, rtol=1e-5, atol=1e-6)


@pytest.mark.thorough(always=["Explicit"])
@pytest.mark.parametrize("types", ["Auto", "Explicit"])
def test_sequences_on_a_mesh(devices, types):
    q, k, v, lengths = arrays()
    masks = jnp.stack([TREE, TREE.T, ~TREE, TREE])
    attend = lambda q, k, v, n, mask: fp.flash_decode(q, k, v, kv_lengths=n, draft_mask=mask)
    given = (q, k, v, lengths, masks)
    right = jax.jit(attend)(*given)
    kind = getattr(jax.sharding.AxisType, types)
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind,) * 2, devices=devices[:4])
    cuts = [jax.P("data", None, "model")] * 3 + [jax.P("data")] * 2
    with jax.set_mesh(mesh):
        placed = [
            jax.device_put(x, jax.NamedSharding(mesh, cut))
            for x, cut in zip(given, cuts, strict=True)
        ]
        found = jax.jit(attend)(*placed)
        one = jax.jit(attend)(*placed[:4], TREE)
    np.testing.assert_allclose(found, right, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(np.asarray(one)[0], right[0], rtol=1e-5, atol=1e-6)


def test_appending_64_drafts():
    _, k, v, _ = arrays()
    cache = fp.KVCache.empty(BATCH, LENGTH, 2, 32, jnp.float32)
    cache = fp.append_kv(cache, k[:, :30], v[:, :30])
    cache = fp.append_kv(cache, k[:, 30:94], v[:, 30:94])
    np.testing.assert_array_equal(cache.k[:, :94], k[:, :94])
    np.testing.assert_array_equal(cache.lengths, [94] * BATCH)


# --- how kernels see it ---------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 32, 33, 64])
def test_words_have_a_bit_for_each_draft(tokens):
    mask = draft_masks.drawn(np.random.default_rng(0), "any", 2, tokens)
    found = np.asarray(drafts.words(jnp.asarray(mask)))
    assert found.shape == (2, -(-tokens // 32), tokens) and found.dtype == np.int32
    draft = np.arange(tokens)
    bits = found[:, draft // 32] >> (draft % 32)[None, :, None] & 1
    np.testing.assert_array_equal(bits.swapaxes(1, 2) == 1, mask)


@pytest.mark.parametrize("kind", ["trees", "any", "others"])
@pytest.mark.parametrize("left", [None, 0, 3, 40])
@pytest.mark.parametrize("start", [None, 37, 100])
def test_bounds_blocks_and_bits_together_are_the_mask(left, start, kind):
    tokens, block, room = 12, 16, 128
    masks = draft_masks.drawn(np.random.default_rng(0), kind, 1, tokens)
    bits = np.asarray(drafts.in_window(masks, left)[0])
    depth = drafts.depths(masks)[0]
    key = np.arange(room)[None]
    for length in (0, 5, 12, 31, 44, 45, 60, 128):
        shown = draft_masks.seen(masks, [length], room, left)[0][0, 0] & (key >= (start or 0))
        draft = key[0] - (length - tokens)
        band = DraftMask(left, 0, tokens, length - tokens)
        first, last = band.keys_of(length - tokens + depth, length, start)
        found = np.where(draft < 0, True, bits[:, np.clip(draft, 0, tokens - 1)]) & (key <= last)
        found &= key >= np.reshape(0 if first is None else first, (-1, 1))
        np.testing.assert_array_equal(found, shown)
        shown = shown.reshape(tokens, -1, block)
        given = jnp.int32(length), block, None if start is None else jnp.int32(start)
        blocks = band.kv_blocks(jnp.int32(length - tokens), tokens, *given)
        first, full_start, full_stop, stop = map(int, blocks)
        assert first <= full_start <= full_stop <= stop <= -(-length // block)
        assert shown[:, full_start:full_stop].all()
        assert not shown[:, :first].any() and not shown[:, stop:].any()


@pytest.fixture
def machine(monkeypatch):
    """Simulates the operations that `draft_bits.hide` is written with; see ptx.py."""
    found = ptx.Machine()
    low = 2**32 - 1
    wide = lambda x: np.asarray(x).astype(np.uint64)
    found.arith.andi, found.arith.ori = np.bitwise_and, np.bitwise_or
    found.arith.shrsi, found.arith.shli = np.right_shift, np.left_shift
    found.arith.shrui = lambda x, y: np.right_shift(wide(x), wide(y))
    found.arith.extui = lambda kind, x: np.asarray(x) & low
    found.arith.trunci = lambda kind, x: np.asarray(x).astype(np.int64) & low
    found.install(monkeypatch, draft_bits)

    def selected(tile, kept, other):
        registers = tile.registers.copy()
        for index, row, col in draft_bits.coordinates(tile.shape, tile.layout):
            keep = np.stack([kept(row, col + e) for e in (0, 1)], axis=1)
            registers[index] = np.where(keep, registers[index], other)
        return ptx.Tile(registers, tile.shape)

    monkeypatch.setattr(draft_bits, "elements", lambda register: 2)
    monkeypatch.setattr(draft_bits, "selected", selected)
    return found


@pytest.mark.parametrize("words", [1, 2])
@pytest.mark.parametrize(
    ("axis", "shape"), [(1, (64, 80)), (0, (128, 16))], ids=["rows", "columns"]
)
def test_bits_in_registers(machine, axis, shape, words):
    """Runs the operations of all threads; the first key lies before, among and after the drafts."""
    rng = np.random.default_rng(0)
    tile = rng.standard_normal(shape).astype(np.float32)
    each = rng.integers(-(2**31), 2**31, (words, shape[1 - axis])).astype(np.int32)
    for start in (-200, -129, -70, -33, -32, -17, -1, 0, 1, 31, 45, 64, 200):
        spread = [np.broadcast_to(x[:, None] if axis else x[None], shape) for x in each]
        registers = [ptx.Tile.of(x.astype(np.int64)) for x in spread]
        own = ptx.Tile.of(tile)
        found = draft_bits._hide_body(axis, None, own, np.int64(start), *registers).values()
        bits = draft_bits.DraftBits(tuple(map(jnp.asarray, each)), jnp.int32(-start))
        right = draft_bits.hide(jnp.asarray(tile), bits, jnp.int32(0), axis, interpret=True)
        np.testing.assert_array_equal(found, right)
        key = np.arange(shape[axis]) + start
        among = (key >= 0) & (key < 32 * words)
        at = np.where(among, key, 0)
        seen = np.where(among[:, None], each[at // 32] >> (at % 32)[:, None] & 1, key[:, None] < 0)
        expected = np.where((seen.T if axis else seen) == 1, tile, -np.inf)
        np.testing.assert_array_equal(right, expected)


@pytest.mark.thorough(always=["hopper"])
@pytest.mark.interpret
@pytest.mark.parametrize("name", ["hopper", "portable"])
def test_a_call_reaches_the_kernel(monkeypatch, name):
    backend = {
        "hopper": HopperBackend(interpret=True, num_sms=2),
        "portable": PortableBackend(interpret=True, capability="8.0", num_sms=2),
    }[name]
    monkeypatch.setattr(dispatch, "BACKENDS", dispatch.BACKENDS | {name: backend})
    q, k, v, lengths = (x[:1] for x in arrays())
    q, k, v = (jnp.tile(x, 2).astype(jnp.bfloat16) for x in (q[:, :, :2], k[:, :, :1], v[:, :, :1]))
    attend = partial(fp.flash_decode, q, k, v, kv_lengths=lengths, draft_mask=TREE)
    with race_checked():
        found = attend(backend=name, num_splits=1)
    right = attend(backend="xla")
    assert jnp.abs(found.astype(jnp.float32) - right.astype(jnp.float32)).max() < 2**-6


def test_explain():
    q = jax.ShapeDtypeStruct((2, 40, 8, 64), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((2, 512, 2, 64), jnp.bfloat16)
    mask = jax.ShapeDtypeStruct((40, 40), bool)
    for gpu, backend in (("H200", "hopper"), ("A100", "portable")):
        found = explain_on(gpu, fp.flash_decode, q, k, k, draft_mask=mask, window=3)
        assert found.backend == backend and found.problem.features == {"draft_mask"}
        slopes = jax.ShapeDtypeStruct((8,), jnp.float32)
        found = explain_on(gpu, fp.flash_decode, q, k, k, draft_mask=mask, alibi_slopes=slopes)
        assert found.backend == "xla" and "no ALiBi with draft_mask" in found.reasons[backend]


MASK = jnp.ones((3, 3), bool)
BAD = {
    "dtype": ({"draft_mask": MASK.astype(jnp.int32)}, TypeError, r"int32: it must be bool.*astype"),
    "list": ({"draft_mask": [[True]]}, TypeError, "draft_mask must be an array, got list"),
    "shape": (
        {"draft_mask": MASK[:2]},
        ValueError,
        r"shape \(2, 3\): it must be.*\(3, 3\), or one such mask per sequence, \(2, 3, 3\)",
    ),
    "batch": ({"draft_mask": jnp.ones((1, 3, 3), bool)}, ValueError, r"shape \(1, 3, 3\)"),
    "offset": ({"q_offset": 4}, ValueError, "so is q_offset.*last key; leave q_offset out"),
    "tokens": ({"q": jnp.ones((2, 65, 4, 16))}, ValueError, "65 tokens: it must be 1 to 64"),
    "blocks": (
        {"kv_blocks": jnp.zeros((2, 1, 1), jnp.int32), "kv_block_size": 16},
        ValueError,
        "kv_blocks is given and so is draft_mask",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name):
    options, error, message = BAD[name]
    given = {"q": jnp.ones((2, 3, 4, 16)), "draft_mask": MASK} | options
    k = jnp.ones((2, 128, 2, 16))
    with pytest.raises(error, match=message):
        fp.flash_decode(given.pop("q"), k, k, **given)
