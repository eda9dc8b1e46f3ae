"""The ragged kernel on CPU: right, free of races and deadlocks, for every mix of prompts."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flash_pallas as fp
from flash_pallas.backends.hopper import HopperBackend
from flash_pallas.backends.hopper.decode.combine import MOST_ELSEWHERE
from flash_pallas.backends.hopper.ragged import tiles
from flash_pallas.backends.xla import XlaBackend
from flash_pallas.core import ragged
from flash_pallas.frontend import dispatch

from .hopper_ragged_cases import MIXES, Mix, assert_matches_oracle, run, run_public
from .interpreter import race_checked

BY_NAME = {mix.name: mix for mix in MIXES}


@pytest.mark.thorough(always=["everything"])
@pytest.mark.interpret
@pytest.mark.parametrize("mix", MIXES, ids=str)
def test_chunks(mix):
    with race_checked():
        found, whole = run(mix)
    assert_matches_oracle(mix, found, whole)


@pytest.mark.thorough
@pytest.mark.interpret
def test_heads_in_sections(monkeypatch):
    """Runs the tiles of one KV head before those of the other."""
    small = BY_NAME["steps_alone"].blocks
    mix = Mix("heads_apart", (20, 30), (20, 70), 56, N=4, K=2, blocks=small)
    monkeypatch.setattr(tiles, "SWIZZLE_BYTES", 1)
    with race_checked():
        found, whole = run(mix)
    assert_matches_oracle(mix, found, whole)


@pytest.mark.thorough
@pytest.mark.interpret
@pytest.mark.parametrize(
    ("num_splits", "sides"), [(1, ()), (2, ("sinks", "slopes")), (MOST_ELSEWHERE + 1, ())]
)
def test_steps_read_and_write_packed_rows(num_splits, sides, monkeypatch):
    """Runs steps between prompts, a sequence without queries, and rows of no sequence."""
    backends = {"hopper": HopperBackend(interpret=True, num_sms=2), "xla": XlaBackend()}
    monkeypatch.setattr(dispatch, "BACKENDS", backends)
    mix = Mix("steps", (1, 11, 1, 0), (40, 30, 130, 9), 21, sides=sides)
    with race_checked():
        found, whole = run_public(mix, num_splits)
    assert_matches_oracle(mix, found, whole, least=1)
    assert np.all(np.isneginf(np.asarray(found[1])[:, sum(mix.counts) :]))


@pytest.mark.interpret
def test_public_function(monkeypatch):
    backends = {"hopper": HopperBackend(interpret=True, num_sms=2), "xla": XlaBackend()}
    monkeypatch.setattr(dispatch, "BACKENDS", backends)
    mix = dataclasses.replace(BY_NAME["pages_of_128"], counts=(20, 4, 1, 0), tokens=32)
    with race_checked():
        found, whole = run_public(mix)
    assert_matches_oracle(mix, found, whole, least=1)
    assert np.all(np.isneginf(np.asarray(found[1])[:, sum(mix.counts) :]))


def problem_of(**changes) -> ragged.RaggedProblem:
    mix = dataclasses.replace(Mix("any", (70,), (70,), 72), **changes)
    given = mix.operands()[0]
    return ragged.describe(given, mix.spec)


@pytest.mark.parametrize(("step_tokens", "tile_rows"), [(1, 64), (4, 128), (16, 192)])
def test_tiles_have_every_row_once(step_tokens, tile_rows):
    rng, seqs, tokens = np.random.default_rng(7), 9, 700
    problem = problem_of(counts=(1,) * seqs, lengths=(1,) * seqs, tokens=tokens, spare=0)
    steps = dataclasses.replace(problem.steps, q_len=step_tokens)
    problem = dataclasses.replace(problem, steps=steps)
    find = jax.jit(lambda x: tiles.chunk_tiles(problem, x, tile_rows))
    for _ in range(20):
        counts = rng.choice([0, 1, step_tokens, step_tokens + 1, 64, 130], size=seqs)
        ends = np.minimum(rng.integers(0, 9) + np.cumsum([0, *counts]), tokens)
        counts, lengths = np.diff(ends), rng.integers(0, 300, seqs)
        given = problem_operands(lengths, ends, tokens)
        table = np.asarray(find(given))
        total = table[0, 0]
        rows = table[1:].reshape(-1, steps.q_heads, table.shape[1])
        number = total // steps.q_heads
        assert total == number * steps.q_heads and number <= len(rows)
        rows = rows[:number]
        assert np.all(rows[:, :, 1] == np.arange(steps.q_heads))  # both heads go together
        np.testing.assert_array_equal(rows[:, 0, 2:], rows[:, 1, 2:])
        seen, keys = np.zeros(tokens, int), []
        for tile in (tiles.TileRow(*row) for row in rows[:, 0]):
            rows = tile.row + np.arange(tile.low, tile.high)
            seen[rows] += 1
            assert tile.row % 8 == 0 and len(rows) > 0
            keys.append(min(tile.position + tile_rows, tile.length))
            if tile.seq < seqs:
                assert rows[0] >= ends[tile.seq] and rows[-1] < ends[tile.seq + 1]
                position = lengths[tile.seq] - counts[tile.seq] + tile.row - ends[tile.seq]
                kept = min(lengths[tile.seq], steps.kv_len)  # those with room
                assert (tile.position, tile.length) == (position, kept)
        seq = np.searchsorted(ends[1:], np.arange(tokens), side="right")
        of_step = np.append(counts <= step_tokens, False)[seq] & (np.arange(tokens) >= ends[0])
        np.testing.assert_array_equal(seen, ~of_step)
        assert keys == sorted(keys, reverse=True)


def problem_operands(lengths, ends, tokens: int) -> ragged.RaggedOperands:
    q, pages = jnp.zeros((tokens, 2, 64), jnp.bfloat16), jnp.zeros((1, 16, 1, 64), jnp.bfloat16)
    integers = (jnp.asarray(x, jnp.int32) for x in (lengths, np.zeros((len(lengths), 20)), ends))
    return ragged.RaggedOperands(q, pages, pages, *integers, num_seqs=jnp.int32(len(lengths)))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": "float32"}, "in bfloat16 and float16, not float32"),
        ({"H": 80}, "head dims of q and k of 16, 32, 64, 96, 128, 192, 256, not 80: pad it"),
        ({"Hv": 320}, "head dims of v of 16, 32, 64, 96, 128, 192, 256, not 320: pad it"),
        ({"page_size": 80}, "pages that divide 128 keys or are multiples of 64, not pages of 80"),
        ({"H": 256, "Hv": 256, "page_size": 48}, "divide 64 keys or are multiples of 64"),
    ],
)
def test_chunks_that_are_refused(changes, reason):
    assert tiles.unsupported_chunks(problem_of()) is None
    found = tiles.unsupported_chunks(problem_of(**changes))
    assert found is not None and reason in found


@pytest.mark.parametrize(
    ("page_size", "head_dims", "block_kv"),
    [
        (16, (64, 64), 128),
        (48, (128, 128), 96),
        (192, (64, 64), 96),
        (256, (128, 128), 128),
        (128, (192, 128), 64),
        (16, (256, 256), 64),
        (96, (32, 64), 96),
    ],
)
def test_blocks_suit_pages(page_size, head_dims, block_kv):
    problem = problem_of(H=head_dims[0], Hv=head_dims[1], page_size=page_size)
    assert tiles.choose_chunk_blocks(problem, 132).block_kv == block_kv


def test_refused_chunks_run_in_jnp(monkeypatch):
    backends = {"hopper": HopperBackend(interpret=True), "xla": XlaBackend()}
    monkeypatch.setattr(dispatch, "BACKENDS", backends)
    ints = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
    places: dict[str, Any] = {"kv_lengths": ints(4), "page_table": ints(4, 6), "cu_q_lens": ints(5)}
    q, pages = jnp.ones((64, 8, 64), jnp.bfloat16), jnp.ones((9, 16, 2, 64), jnp.bfloat16)
    found = fp.explain(fp.ragged_paged_attention, q, pages, pages, **places)
    assert (found.backend, found.blocks.chunks_on) == ("hopper", "hopper")
    found = fp.explain(
        fp.ragged_paged_attention, q, pages.astype(jnp.int8), pages.astype(jnp.int8), **places
    )
    assert (found.backend, found.blocks.chunks_on) == ("hopper", "xla")
    found = fp.explain(fp.ragged_paged_attention, q[:1], pages, pages, **places)
    assert found.blocks.chunks is None
