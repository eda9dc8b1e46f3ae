"""The benchmark of serving: its mixes, its gate, and that it runs on a CPU."""

from __future__ import annotations

import json
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import results, run_serving, serving, timing

SIZES = {"page_size": 16, "heads": 4, "kv_heads": 2, "head_dim": 16}
MIXED = serving.Mix("mixed", ((1, 40), (5, 33), (1, 48)), prefix=32, **SIZES)
CHUNKS = serving.Mix("chunks", ((6, 32), (6, 32)), **SIZES)
STEPS = serving.Mix("steps", ((1, 32), (1, 7)), **SIZES)


@pytest.fixture(autouse=True)
def one_layer(monkeypatch):
    monkeypatch.setattr(serving, "LAYERS", 1)


def test_a_table_has_common_pages_once():
    table = MIXED.table()
    assert table.shape == (3, 3) and (table[:, :2] == table[0, :2]).all()
    assert len(set(table[:, 2].tolist()) | set(table[0].tolist())) == MIXED.pages == 5
    assert MIXED.kv_bytes == 5 * 16 * 2 * 2 * 2 * 16


def test_operations_are_those_of_what_is_seen():
    seen = sum(keys - (queries - 1) + t for queries, keys in ((6, 32),) * 2 for t in range(queries))
    assert CHUNKS.flops == 4 * 4 * 16 * seen


def test_parts_leave_out_the_others():
    found = MIXED.integers(lambda queries: queries == 1)
    assert int(found["num_seqs"]) == 2 and found["cu_q_lens"].tolist() == [0, 1, 2, 2]
    assert found["kv_lengths"].tolist() == [40, 48, 33]
    np.testing.assert_array_equal(found["page_table"], MIXED.table()[[0, 2, 1]])


@pytest.mark.parametrize(
    "mix",
    [pytest.param(MIXED, marks=pytest.mark.thorough), CHUNKS, STEPS],
    ids=lambda mix: mix.name,
)
def test_rows_of_a_mix(mix):
    rows = run_serving.run_mix(mix, "xla", timing.HostTimer(), 2)
    assert [row["refused"] for row in rows] == [None] * len(rows)
    assert [row["call"] for row in rows] == list(run_serving.programs(mix, "xla"))
    assert rows[0]["speed"] == 1.0 and all(row["gate"] <= 1.0 for row in rows)
    assert rows[0]["tflops"] == pytest.approx(mix.flops / rows[0]["ms"] / 1e9)


def test_a_wrong_result_is_refused(monkeypatch):
    monkeypatch.setattr(serving, "steps", lambda arrays, **_: [jnp.ones_like(arrays.q[0])])
    rows = run_serving.run_mix(STEPS, "xla", timing.HostTimer(), 2)
    assert "wrong result" in rows[1]["refused"] and rows[1]["ms"] is None
    assert "wrong result" in run_serving.line(rows[1])


def test_the_command(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(run_serving, "MIXES", (STEPS,))
    monkeypatch.setattr(run_serving, "prepare_process", lambda limit: None)
    monkeypatch.setattr(timing, "choose", lambda name, probes: (timing.HostTimer(), {}))
    monkeypatch.setattr(run_serving, "probes", dict)
    out = tmp_path / "serving.json"
    monkeypatch.setattr(
        sys, "argv", ["run", "--out", str(out), "--backend", "xla", "--rounds", "2"]
    )
    run_serving.main()
    found = json.loads(out.read_text())
    results.check(found)
    assert len(found["rows"]) == 2 and "steps" in capsys.readouterr().out
