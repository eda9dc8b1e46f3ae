"""The benchmark of decoding: its gate, its report of a run, and that it runs on a CPU."""

from __future__ import annotations

import dataclasses
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("matplotlib")

from benchmarks import (
    decoders,
    decoding,
    plot,
    readers,
    results,
    run_decode,
    tables,
    timing,
)
from flash_pallas.core.decode import QUANTISED

from .interpreter import race_checked

SMALL = decoding.Sizes(2, 512, 8, 2, 64)
COARSE = dataclasses.replace(SMALL, coarse=True)
CALL = decoding.Call
CALLS = (
    CALL(),
    CALL(queries=4, page_size=64),
    CALL(num_splits=3),
    CALL(padding=100),
    CALL(traced_window=True),
    CALL(chosen=3),
    CALL(num_splits=2, blocks=(("block_kv", 64),)),
)


@pytest.fixture
def few_bytes(monkeypatch):
    monkeypatch.setattr(run_decode, "ROTATED_BYTES", 2 * SMALL.kv_bytes)


def rows_of(*calls, backend="xla", sizes=SMALL):
    group = decoding.Group("some", sizes, calls)
    shop = run_decode.Workshop(backend)
    shop.announce(group)
    return run_decode.run_group(shop, group, timing.HostTimer(), 2, {1 << 20: 100.0})


@pytest.mark.thorough
def test_rows_of_a_group(few_bytes):
    rows = rows_of(*CALLS)
    assert [row["refused"] for row in rows] == [None] * len(CALLS)
    assert [row["chosen"]["num_splits"] for row in rows] == [1, 1, 3, 1, 1, 1, 2]
    assert rows[-1]["chosen"]["block_kv"] == 64
    for row, call in zip(rows, CALLS, strict=True):
        assert 0.1 < row["gate"] <= 1.0
        size = SMALL.kv_bytes * (3 * 64 / 512 if call.chosen else 1)
        assert row["gb_per_s"] == pytest.approx(size / row["ms"] / 1e6)
        assert row["of_ceiling"] == pytest.approx(row["gb_per_s"] / 100.0)
        assert row["of_reader"] == row["of_ceiling"]
        work = 4 * SMALL.batch * SMALL.heads * SMALL.head_dim * call.queries
        keys = 3 * 64 if call.chosen else SMALL.length
        assert row["tflops"] == pytest.approx(work * keys / row["ms"] / 1e9)
    assert rows[0]["speed"] == 1.0


def test_rows_of_heads_whose_values_are_narrower(few_bytes):
    sizes = decoding.Sizes(2, 256, 4, 1, 320, v_head_dim=272)
    calls = CALL(), CALL(page_size=64)
    rows = rows_of(*calls, sizes=sizes)
    assert [row["refused"] for row in rows] == [None] * len(calls)
    assert [row["shape"] for row in rows] == ["2,256,4,1,320/272"] * len(calls)
    assert all(0.1 < row["gate"] <= 1.0 for row in rows)
    assert sizes.kv_bytes == 2 * 2 * 256 * (320 + 272)


def test_rows_of_values_that_are_columns_of_the_keys(few_bytes):
    sizes = decoding.Sizes(2, 256, 4, 1, 320, v_head_dim=272, shared=True)
    calls = CALL(), CALL(page_size=64), CALL(padding=100)
    rows = rows_of(*calls, sizes=sizes)
    assert [row["refused"] for row in rows] == [None] * len(calls)
    assert [row["shape"] for row in rows] == ["2,256,4,1,320/272 shared"] * len(calls)
    assert all(0.1 < row["gate"] <= 1.0 for row in rows)
    assert sizes.kv_bytes == 2 * 2 * 256 * 320


@pytest.mark.thorough
def test_rows_of_caches_in_eight_bits(few_bytes):
    calls = CALL(), *(CALL(cache=x, page_size=p) for x in QUANTISED for p in (None, 64))
    rows = rows_of(*calls, sizes=COARSE)
    assert [row["refused"] for row in rows] == [None] * len(calls)
    for row, call in zip(rows, calls, strict=True):
        assert 0.1 < row["gate"] <= 1.0
        size = SMALL.kv_bytes // (1 if call.cache is None else 2)
        assert row["gb_per_s"] == pytest.approx(size / row["ms"] / 1e6)


@pytest.mark.thorough
def test_the_reference_is_causal_from_the_end():
    q, (k, v) = SMALL.queries(4), SMALL.caches(1)[0]
    exact, plain = decoders.reference(q, k, v)
    last = decoders.reference(q[:, :1], k[:, :-3], v[:, :-3])[0]
    assert plain.dtype == q.dtype and exact.dtype == jnp.float32
    np.testing.assert_allclose(exact[:, :1], last, rtol=1e-4, atol=1e-5)
    assert jnp.abs(exact[:, 1] - decoders.reference(q, k[:, :-3], v[:, :-3])[0][:, 1]).max() > 1e-3


def test_what_is_wrong_gets_no_time(monkeypatch, few_bytes):
    right = decoders.ours

    def wrong(*given):
        decoder = right(*given)
        run = lambda *x: decoder.run(*x) * 1.02
        return decoders.Decoder(decoder.arrange, run, decoder.chosen)

    monkeypatch.setitem(decoders.PROVIDERS, decoding.OURS, wrong)
    (row,) = rows_of(CALL())
    assert row["ms"] is None and "wrong result" in row["refused"]
    assert "wrong result" in run_decode.line(row)


def test_peers_say_what_they_do_not_take(few_bytes):
    rows = rows_of(CALL(), *(CALL(p, queries=4) for p in (decoding.CUDNN, decoding.TRITON)))
    assert ["takes one query" in (row["refused"] or "") for row in rows] == [False, True, True]


def test_every_call_of_the_groups_can_be_made():
    for group in decoding.GROUPS:
        labels = [call.label for call in group.calls]
        assert len(set(labels)) == len(labels)
        for call in group.calls:
            if call.page_size is not None:
                assert group.sizes.length % call.page_size == 0
            if call.provider == decoding.OURS:
                chosen = decoders.ours(group.sizes, call, "hopper").chosen
                assert chosen["num_splits"] == (call.num_splits or chosen["num_splits"])


def test_caches_differ_and_hold_enough():
    caches = SMALL.caches(2 * SMALL.kv_bytes + 1)
    assert len(caches) == 3 and sum(x.nbytes for x in caches[0]) == SMALL.kv_bytes
    first = {float(x[0, 0, 0, 0]) for pair in caches for x in pair}
    assert len(first) > 4


@pytest.mark.interpret
def test_the_reader_reads_every_tile():
    reader = readers.Reader(3, 16, 2, interpret=True)
    with race_checked():
        read = jax.jit(reader)(jnp.zeros((8 * 16, readers.COLUMNS), jnp.bfloat16))
    assert read[:, 0].tolist() == [2, 3, 3]


def test_command_line_table_and_plot(monkeypatch, tmp_path, few_bytes):
    splits = decoding.Group("splits", SMALL, (CALL(num_splits=1), CALL(num_splits=2)))
    other = decoding.Group("lengths", SMALL, (CALL(), CALL(decoding.TRITON)))
    monkeypatch.setattr(run_decode, "GROUPS", (other, splits))
    monkeypatch.setattr(run_decode, "prepare_process", lambda limit: None)
    monkeypatch.setattr(run_decode, "probes", dict)
    monkeypatch.setattr(timing, "choose", lambda name, probes: (timing.HostTimer(), {}))
    run = run_decode.run
    monkeypatch.setattr(run_decode, "run", lambda *given: run(*given, "xla"))
    out = tmp_path / "decode.json"
    options = ("--out", str(out), "--rounds", "1", "--ceiling-bytes", str(1 << 20))
    monkeypatch.setattr(sys, "argv", ["run_decode", *options])
    run_decode.main()
    found = results.load(out)
    expected = [*["ceiling"] * 5, "lengths", "lengths", "splits", "splits"]
    assert [row["group"] for row in found["rows"]] == expected
    assert json.loads(out.read_text()) == found
    table = tables.render(found)
    assert table.count("| lengths | 2,512,8,2,64 |") == 1 and "- pallas_triton: " in table
    plot.plot_results(found, tmp_path / "splits.png")
    assert (tmp_path / "splits.png").stat().st_size > 5000
