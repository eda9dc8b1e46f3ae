"""Block ranges that depend on arrays, against brute force over all pairs of positions."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from flash_pallas.core import bounds
from flash_pallas.core.mask import Mask
from flash_pallas.core.problem import AttentionSpec, Operands, describe

from .test_mask import MASKS
from .test_mask import visible as band

BATCH, Q_LEN, KV_LEN, BLOCK_Q, BLOCK_KV = 4, 23, 19, 4, 3
RNG = np.random.default_rng(0)

SEGMENTS = {
    "none": None,
    "sorted": tuple(np.sort(RNG.integers(0, 4, (BATCH, n))) for n in (Q_LEN, KV_LEN)),
    "any": (RNG.integers(0, 9, (BATCH, Q_LEN)), RNG.integers(0, 9, (BATCH, KV_LEN))),
    "padded": (
        np.broadcast_to(np.where(np.arange(Q_LEN) < 9, 3, -1), (BATCH, Q_LEN)),
        np.broadcast_to(np.where(abs(np.arange(KV_LEN) - 8) < 3, 3, -2), (BATCH, KV_LEN)),
    ),
    "foreign": (np.full((BATCH, Q_LEN), 1), np.full((BATCH, KV_LEN), 2)),
}  # fmt: skip


def build(mask, segments, lengths, offset):
    """Builds (Problem, Operands, bool[B, T, S] of visible pairs)."""
    q = jnp.zeros((BATCH, Q_LEN, 2, 8))
    k = jnp.zeros((BATCH, KV_LEN, 1, 8))
    arrays = {}
    offsets = np.broadcast_to(offset, (BATCH,))
    if not isinstance(offset, int):
        arrays["q_offset"] = jnp.asarray(offsets, jnp.int32)
    table = np.stack([band(mask, Q_LEN, KV_LEN, int(o)) for o in offsets])
    if segments is not None:
        for name, ids in zip(("q_segments", "kv_segments"), segments, strict=True):
            arrays[name] = jnp.asarray(ids, jnp.int32)
        same = segments[0][:, :, None] == segments[1][:, None]
        table &= same & (segments[0] >= 0)[:, :, None]
    if lengths is not None:
        arrays["kv_lengths"] = jnp.asarray(lengths, jnp.int32)
        table &= np.arange(KV_LEN) < np.array(lengths)[:, None, None]
    spec = AttentionSpec(1.0, mask, q_offset=offset if isinstance(offset, int) else 0)
    operands = Operands(q, k, k, **arrays)
    return describe(operands, spec), operands, table


def check(found, table, own, other, *, exact):
    """Checks `found`, int32[B, blocks, 2], against `table`, bool[B, own length, other length]."""
    found = np.asarray(found)
    own_blocks, other_blocks = (
        -(-n // b) for n, b in zip(table.shape[1:], (own, other), strict=True)
    )
    assert found.shape == (len(table), own_blocks, 2) and found.dtype == np.int32
    for b, block in np.ndindex(*found.shape[:2]):
        start, stop = found[b, block]
        rows = table[b, block * own : (block + 1) * own]
        seen = [c for c in range(other_blocks) if rows[:, c * other : (c + 1) * other].any()]
        assert 0 <= start <= stop <= other_blocks
        if seen:
            assert start <= seen[0] and seen[-1] < stop
        if start == stop:
            assert (start, stop) == (0, 0)
        if exact:
            assert (start, stop) == ((seen[0], seen[-1] + 1) if seen else (0, 0))


@pytest.mark.thorough(
    always=[
        "0-None-sorted-Mask(left=None, right=0)",
        "-5-lengths1-padded-Mask(left=3, right=0)",
        "offset2-None-any-Mask(left=2, right=4)",
    ]
)
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("name", SEGMENTS)
@pytest.mark.parametrize("lengths", [None, (0, 7, 19, 12)])
@pytest.mark.parametrize("offset", [0, -5, (3, -9, 0, 30)])
def test_nothing_visible_is_left_out(mask, name, lengths, offset):
    problem, operands, table = build(mask, SEGMENTS[name], lengths, offset)
    found = bounds.kv_bounds(problem, operands, BLOCK_Q, BLOCK_KV)
    check(found, table, BLOCK_Q, BLOCK_KV, exact=False)
    found = bounds.q_bounds(problem, operands, BLOCK_Q, BLOCK_KV)
    check(found, table.swapaxes(1, 2), BLOCK_KV, BLOCK_Q, exact=False)


@pytest.mark.parametrize("name", ["none", "sorted", "padded", "foreign"])
@pytest.mark.parametrize("lengths", [None, (0, 6, 19, 12)])
def test_sorted_segments_and_lengths_read_no_block_in_vain(name, lengths):
    # Document boundaries on block boundaries: ranges of ids overlap only where ids are shared.
    segments = SEGMENTS[name]
    if name == "sorted":
        aligned = lambda length, block: np.repeat(np.arange(length // block + 1) // 2, block)
        segments = [
            np.broadcast_to(aligned(n, block)[:n], (BATCH, n))
            for n, block in ((Q_LEN, BLOCK_Q), (KV_LEN, BLOCK_KV))
        ]
    problem, operands, table = build(Mask(), segments, lengths, 0)
    found = bounds.kv_bounds(problem, operands, BLOCK_Q, BLOCK_KV)
    check(found, table, BLOCK_Q, BLOCK_KV, exact=True)
    found = bounds.q_bounds(problem, operands, BLOCK_Q, BLOCK_KV)
    check(found, table.swapaxes(1, 2), BLOCK_KV, BLOCK_Q, exact=True)


def whole(same, own, other):
    """Returns bool[B, own blocks, other blocks]: True for whole blocks of one document only."""
    shape = [n // b for n, b in zip(same.shape[1:], (own, other), strict=True)]
    sizes = zip(same.shape[1:], (own, other), strict=True)
    found = np.zeros((len(same), *(-(-n // b) for n, b in sizes)), bool)
    for b, i, j in np.ndindex(len(same), *shape):
        found[b, i, j] = same[b, i * own : (i + 1) * own, j * other : (j + 1) * other].all()
    return found


@pytest.mark.parametrize("name", ["sorted", "any", "padded", "foreign", "one", "alternating"])
def test_blocks_inside_one_document(name):
    segments = SEGMENTS.get(name)
    if name == "one":  # the last blocks are not whole
        segments = tuple(np.zeros((BATCH, n), np.int32) for n in (Q_LEN, KV_LEN))
    if name == "alternating":  # three blocks, one of another document, two blocks, a rest
        ids = np.repeat([0, 0, 0, 1, 0, 0, 2], BLOCK_KV)[:KV_LEN]
        segments = np.zeros((BATCH, Q_LEN), np.int32), np.broadcast_to(ids, (BATCH, KV_LEN))
    _, operands, same = build(Mask(), segments, None, 0)
    for find, table, sizes in (
        (bounds.kv_whole, same, (BLOCK_Q, BLOCK_KV)),
        (bounds.q_whole, same.swapaxes(1, 2), (BLOCK_KV, BLOCK_Q)),
    ):
        found = np.asarray(find(operands, BLOCK_Q, BLOCK_KV))
        expected = whole(table, *sizes)
        assert found.shape == (*expected.shape[:2], 2) and found.dtype == np.int32
        for b, i in np.ndindex(*expected.shape[:2]):
            start, stop = found[b, i]
            blocks = np.flatnonzero(expected[b, i])
            assert expected[b, i, start:stop].all()
            assert stop == (blocks[-1] + 1 if len(blocks) else 0)
            assert start == 0 or not expected[b, i, start - 1]


@pytest.mark.parametrize(
    ("segments", "lengths", "offset", "dynamic"),
    [
        ("none", None, (1, 2, 3, 4), False),
        ("any", None, 0, True),
        ("none", (1, 2, 3, 4), 0, True),
    ],
)
def test_which_problems_need_arrays_of_bounds(segments, lengths, offset, dynamic):
    problem, _, _ = build(Mask.causal(), SEGMENTS[segments], lengths, offset)
    assert problem.is_dynamic == dynamic


@pytest.mark.parametrize("kv_positions", [None, "sorted", "random"])
@pytest.mark.parametrize("sides", [(3, None), (None, 2), (4, 1)], ids=str)
def test_blocks_by_positions(kv_positions, sides):
    rng = np.random.default_rng(1)
    _, operands, _ = build(Mask(), None, None, 0)
    q = np.sort(rng.integers(0, KV_LEN, (BATCH, Q_LEN)), axis=1)
    kv = np.broadcast_to(np.arange(KV_LEN), (BATCH, KV_LEN))
    if kv_positions is not None:
        kv = rng.integers(0, KV_LEN, (BATCH, KV_LEN))
        kv = np.sort(kv, axis=1) if kv_positions == "sorted" else kv
        operands = operands._replace(kv_positions=jnp.asarray(kv, jnp.int32))
    table = np.ones((BATCH, Q_LEN, KV_LEN), bool)
    for name, side, sign in zip(("q_first", "q_last"), sides, (-1, 1), strict=True):
        if side is not None:
            edge = q + sign * side
            operands = operands._replace(**{name: jnp.asarray(edge, jnp.int32)})
            table &= sign * (edge[:, :, None] - kv[:, None]) >= 0
    problem = describe(operands, AttentionSpec(1.0))
    found = bounds.kv_bounds(problem, operands, BLOCK_Q, BLOCK_KV)
    check(found, table, BLOCK_Q, BLOCK_KV, exact=kv_positions is None)
    found = bounds.q_bounds(problem, operands, BLOCK_Q, BLOCK_KV)
    check(found, table.swapaxes(1, 2), BLOCK_KV, BLOCK_Q, exact=False)
    for find, of, sizes in (
        (bounds.kv_whole, table, (BLOCK_Q, BLOCK_KV)),
        (bounds.q_whole, table.swapaxes(1, 2), (BLOCK_KV, BLOCK_Q)),
    ):
        found, expected = np.asarray(find(operands, BLOCK_Q, BLOCK_KV)), whole(of, *sizes)
        for b, i in np.ndindex(*expected.shape[:2]):
            start, stop = found[b, i]
            full = slice(start, min(stop, of.shape[2] // sizes[1]))
            rows = of[b, i * sizes[0] : (i + 1) * sizes[0]]
            assert rows[:, full.start * sizes[1] : full.stop * sizes[1]].all()
            assert stop >= max(np.flatnonzero(expected[b, i]), default=-1) + 1
