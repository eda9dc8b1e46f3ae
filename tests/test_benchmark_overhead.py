"""The overhead of launches: what is timed, and what the table says about it."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flash_pallas as fp
from benchmarks import gate, overhead, results, run_overhead, suites, tables

SMALL = suites.Shape(1, 32, 4, 2, 16)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(overhead, "SHAPES", (SMALL,))
    monkeypatch.setattr(overhead, "LAYERS", 3)


def test_a_stack_is_layers_on_top_of_each_other():
    q, k, v, do = gate.random_inputs(SMALL, jnp.float32)
    attention = functools.partial(fp.flash_attention, causal=True, backend="xla")
    works = {work.name: work for work in overhead.work(attention)}
    by_hand = attention(attention(attention(q, k, v), k, v), k, v)
    stack = works["scan of 3"]
    assert stack.calls == 3
    np.testing.assert_array_equal(jax.jit(stack.function)(q, k, v, do), by_hand)
    o, gradients = jax.jit(works["scan of 3, with gradient"].function)(q, k, v, do)
    np.testing.assert_array_equal(o, by_hand)
    assert [x.shape for x in gradients] == [q.shape, k.shape, v.shape]


def test_tiles_are_counted_in_whole_ones():
    assert overhead.tiles(suites.Shape(2, 129, 3, 1, 64)) == 2 * 3 * 2


def test_a_run_to_its_table(monkeypatch, tmp_path):
    wrong = lambda q, k, v: q + q
    monkeypatch.setitem(overhead.ATTENTION, "wrong", wrong)
    out = tmp_path / "overhead.json"
    names = "flash_pallas_xla,wrong,flash_pallas"
    arguments = run_overhead.parse(["--out", str(out), "--providers", names, "--rounds", "1"])
    graphs = {(SMALL.label, "flash_pallas_xla", "jit"): 12.5}
    run_overhead.run(arguments, graphs, None, {})
    found = results.load(out)
    rows = {(row["provider"], row["work"]): row for row in found["rows"]}
    assert len(rows) == 15
    assert all(rows["flash_pallas_xla", work]["wall_us"] > 0 for _, work in rows)
    assert "wrong result" in rows["wrong", "scan of 3"]["refused"]
    assert "needs an NVIDIA GPU" in rows["flash_pallas", "jit"]["refused"]
    table = tables.render(found)
    wall = rows["flash_pallas_xla", "jit"]["wall_us"]
    assert f"| 1,32,4,2,16 | 4 | jit | - | {wall:.1f} (12.5) | - | - | - (-) | - |" in table


def test_the_process_with_graphs_prints_what_the_other_reads(monkeypatch, capsys):
    arguments = run_overhead.parse(["--wall-only", "--providers", "flash_pallas_xla"])
    run_overhead.main(arguments, {})
    printed = capsys.readouterr().out
    monkeypatch.setattr(
        run_overhead.subprocess,
        "run",
        lambda *_, **__: run_overhead.subprocess.CompletedProcess([], 0, printed, ""),
    )
    found = run_overhead.with_graphs(arguments)
    assert set(found) == {
        (SMALL.label, "flash_pallas_xla", work.name) for work in overhead.work(lambda *x: x[0])
    }
