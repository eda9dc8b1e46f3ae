"""The benchmarks' own logic: what a number is made of, and that a wrong result gets none."""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import importlib.machinery
import itertools
import multiprocessing
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flash_pallas
from benchmarks import (
    features,
    flops,
    gate,
    memory,
    providers,
    results,
    run,
    run_versions,
    suites,
    timing,
    tracing,
)
from tests import flash_attention_3_stand_in

SHAPE = suites.Shape(1, 128, 4, 2, 64)
CELL = suites.Cell(SHAPE, True)


# --- versions


def test_versions_are_divided_by_the_first():
    attention = providers.flash_pallas_attention(CELL, backend="xla")
    make = tracing.compiled(tracing.lower(attention, gate.input_shapes(SHAPE, jnp.bfloat16)))
    asked = argparse.Namespace(rounds=3, reading_ms=1.0, directions=("forward", "backward"))
    with jax.numpy_dtype_promotion("standard"):  # which jax.nn takes for granted
        other = run_versions.make_peer("jax_xla", CELL)
    versions = {"before": make, "after": make, "jax_xla": other}
    found = run_versions.compare(versions, CELL, timing.HostTimer(), asked)
    assert [row["direction"] for row in found] == ["forward", "backward"]
    for row in found:
        assert row["time_ratio"]["before"] == 1.0 and row["spread"]["before"] == 0.0
        assert row["time_ratio"]["after"] > 0 and row["ms"].keys() == versions.keys()
        assert "after" in run_versions.line(row) and "before" not in run_versions.line(row)
        assert set(row["differs"]["after"].values()) == {0.0}
        assert 0 < max(row["differs"]["jax_xla"].values()) < 0.02
    assert [*found[0]["differs"]["after"]] == ["o"]
    assert sorted(found[1]["differs"]["after"]) == ["dk", "dq", "dv"]


def test_cells_of_versions_are_those_of_a_suite_or_of_the_command_line():
    asked = argparse.Namespace(cells=["1,128,4,2,64"], suite="fa3", only="32,32,64 causal")
    assert run_versions.cells_of(asked)[1] == CELL and len(run_versions.cells_of(asked)) == 2
    asked.cells = []
    assert {cell.shape.head_dim for cell in run_versions.cells_of(asked)} == {64}


def test_tile_sizes_are_versions():
    blocks = ['small={"forward": {"block_kv": 64}}']
    asked = argparse.Namespace(
        packages=["before", "flash_pallas"], blocks=blocks, backend="hopper", call={"softcap": 3.0}
    )
    call = {"softcap": 3.0, "backend": "hopper"}
    assert run_versions.versions(asked) == {
        "before": ("before", call),
        "flash_pallas": ("flash_pallas", call),
        "small": ("flash_pallas", call | {"blocks": {"forward": {"block_kv": 64}}}),
    }


def test_calls_of_features_are_compared(monkeypatch):
    """Checks that a version that refuses a call is left out of its rows."""
    sizes = features.Sizes(1, 64, 2, 2, 16, 16)
    softcap, plain = features.Variant("softcap", (("softcap", 3.0),)), features.Variant("causal")
    groups = (features.Group("small", sizes, (softcap, plain)),)
    monkeypatch.setattr(features, "GROUPS", groups)

    def flash_attention(q, k, v, *, backend, softcap=None):
        if softcap is not None:
            raise NotImplementedError("no softcap yet")
        return flash_pallas.flash_attention(q, k, v, backend=backend)

    earlier = types.SimpleNamespace(flash_attention=flash_attention)
    monkeypatch.setitem(sys.modules, "earlier", earlier)
    monkeypatch.setitem(sys.modules, "copy_of_it", flash_pallas)
    packages = ["earlier", "copy_of_it", "flash_pallas"]
    asked = {"features": ["small"], "backend": "xla", "packages": packages, "workers": 0}
    both = "forward", "backward"
    asked = argparse.Namespace(rounds=2, reading_ms=1.0, directions=both, **asked)
    found = {}
    for rows in run_versions.compare_features(asked, timing.HostTimer()):
        found |= {(row["cell"], row["direction"]): list(row["time_ratio"]) for row in rows}
    names = {f"small 1,64,2,2,16 {name}": kept for name, kept in (("softcap", 1), ("causal", 0))}
    directions = ("forward", "backward")
    assert found == {(n, d): packages[first:] for n, first in names.items() for d in directions}
    asked.features = ["small 1,64,2,2,16 causal"]
    (rows,) = run_versions.compare_features(asked, timing.HostTimer())
    assert {row["cell"] for row in rows} == {"small 1,64,2,2,16 causal"}


# --- flops


@pytest.mark.parametrize(("q_len", "kv_len"), [(5, 5), (3, 7), (7, 3), (1, 1)])
def test_visible_pairs_counts_the_mask(q_len, kv_len):
    assert flops.visible_pairs(q_len, kv_len, True) == int(np.tril(np.ones((q_len, kv_len))).sum())
    assert flops.visible_pairs(q_len, kv_len, False) == q_len * kv_len


def test_flops_of_a_full_forward_and_backward():
    forward = flops.attention_flops(SHAPE, False, "forward")
    assert forward == 4 * 1 * 4 * 128 * 128 * 64
    assert flops.attention_flops(SHAPE, False, "backward") == 2.5 * forward
    assert flops.tflops(SHAPE, False, "forward", ms=1.0) == pytest.approx(forward / 1e9)


def test_unknown_direction_is_an_error():
    with pytest.raises(KeyError):
        flops.attention_flops(SHAPE, False, "sideways")


# --- suites


def test_suites_hold_the_promised_cells():
    quick, h200 = (set(suites.SUITES[name]) for name in ("quick", "h200"))
    assert quick < h200
    assert len(quick) == 6
    assert {c.shape.head_dim for c in quick} == {64, 128, 256}
    assert all((c.shape.batch, c.shape.q_len) == (4, 4096) for c in quick)
    assert len(h200) == 12
    assert any(c.shape.kv_heads < c.shape.q_heads for c in h200)
    fa3 = set(suites.SUITES["fa3"])
    assert h200 < fa3
    assert {c.shape.head_dim for c in fa3} == {64, 128, 192, 256}
    assert {512, 16384} <= {c.shape.q_len for c in fa3 if c.causal}
    assert all(c.shape.batch * c.shape.q_len == 16384 for c in fa3)
    assert all(c.shape.reason for cells in suites.SUITES.values() for c in cells)
    charts = {(c.shape.head_dim, c.shape.q_len, c.causal) for c in suites.SUITES["charts"]}
    lengths = (512, 1024, 2048, 4096, 8192, 16384)
    assert charts == set(itertools.product((64, 128, 256), lengths, (False, True)))
    assert {c.shape.batch * c.shape.q_len for c in suites.SUITES["charts"]} == {16384}
    assert suites.MEMORY_LENGTHS[0] == 1024
    assert suites.MEMORY_LENGTHS[-1] == 128 * 1024


# --- the gate


@pytest.fixture(scope="module")
def judged():
    inputs = gate.random_inputs(SHAPE)
    runner = providers.prepare("flash_pallas_xla", CELL, jnp.bfloat16)(inputs)
    return gate.build_oracle(inputs, True), runner.results()


def test_the_gate_lets_a_right_result_pass(judged):
    oracle, found = judged
    assert set(found) == {"o", "lse", "dq", "dk", "dv"}
    verdicts = oracle.check(found)
    assert all(verdict.ok for verdict in verdicts.values()), verdicts


@pytest.mark.parametrize("name", ["o", "lse", "dq", "dk", "dv"])
@pytest.mark.parametrize("how", ["head", "element", "nan"])
def test_the_gate_refuses_a_wrong_result(judged, name, how):
    oracle, found = judged
    value = found[name]
    if how == "nan":
        value = value.at[0, 1, 1].set(jnp.nan)
    elif how == "element":
        value = value.at[(0,) * value.ndim].add(jnp.asarray(1, value.dtype))
    else:
        value = jnp.roll(value, 1, axis=1 if name == "lse" else 2)
    verdict = oracle.check({name: value})[name]
    assert not verdict.ok
    entry = run.Entry(verdicts={name: verdict})
    wrong, right = ("forward", "backward") if name in ("o", "lse") else ("backward", "forward")
    assert f"wrong result: {name}" in entry.refusal(wrong)
    assert entry.refusal(right) is None
    assert run.gate_summary({name: verdict})["ok"] is False


def test_the_gate_refuses_another_shape(judged):
    oracle, found = judged
    with pytest.raises(ValueError, match="not"):
        oracle.check({"o": found["o"][:, :64]})


def test_the_oracle_covers_every_head_of_every_batch_element():
    shape = dataclasses.replace(SHAPE, batch=2)
    inputs = gate.random_inputs(shape)
    oracle = gate.build_oracle(inputs, False)
    wide = [x.astype(jnp.float32) for x in inputs[:3]]
    o = jax.nn.dot_product_attention(*wide, implementation="xla")
    np.testing.assert_allclose(oracle.exact["o"], o, atol=1e-5)
    assert oracle.exact["lse"].shape == (2, 4, 128)


@pytest.mark.parametrize("name", ["fa4", "fa4_jax"])
def test_flash_attention_4_says_what_is_missing(name):
    with pytest.raises(providers.Unsupported, match="not installed"):
        providers.prepare(name, CELL, jnp.bfloat16)(gate.random_inputs(SHAPE))


def test_flash_attention_4_from_jax_is_called_as_it_wants(judged, monkeypatch):
    oracle, _ = judged
    module = types.ModuleType("fa4_jax")
    module.__spec__ = importlib.machinery.ModuleSpec("fa4_jax", None)
    module.flash_attn = functools.partial(flash_pallas.flash_attention, backend="xla")
    monkeypatch.setitem(sys.modules, "fa4_jax", module)
    runner = providers.prepare("fa4_jax", CELL, jnp.bfloat16)(gate.random_inputs(SHAPE))
    assert all(verdict.ok for verdict in oracle.check(runner.results()).values())


def test_flash_attention_3_says_what_is_missing(monkeypatch):
    missing = lambda cell=CELL: providers.prepare("fa3", cell, jnp.bfloat16)
    with pytest.raises(providers.Unsupported, match="dew-flash-attn is not installed"):
        missing()
    calls = flash_attention_3_stand_in.install(monkeypatch, capability="8.0")
    with pytest.raises(providers.Unsupported, match=r"needs compute capability 9\.0, not 8\.0"):
        missing()  # there the package runs FlashAttention-2
    flash_attention_3_stand_in.install(monkeypatch)
    wide = suites.Cell(dataclasses.replace(SHAPE, head_dim=512), True)
    with pytest.raises(providers.Unsupported, match="up to 256, not 512"):
        missing(wide)
    assert not calls


def test_flash_attention_3_is_called_as_it_wants(judged, monkeypatch):
    oracle, _ = judged
    calls = flash_attention_3_stand_in.install(monkeypatch)
    runner = providers.prepare("fa3", CELL, jnp.bfloat16)(gate.random_inputs(SHAPE))
    found = runner.results()
    assert set(found) == {"o", "dq", "dk", "dv"}
    assert all(verdict.ok for verdict in oracle.check(found).values())
    shapes = [(1, 128, 4, 64), (1, 128, 2, 64), (1, 128, 2, 64)]
    seen = {"name": "flash_mha", "shapes": shapes, "causal": True, "window": (-1, -1)}
    assert calls and all(call == seen for call in calls)
    calls.clear()
    providers.prepare("fa3", dataclasses.replace(CELL, causal=False), jnp.bfloat16)
    assert calls and all(call == seen | {"causal": False} for call in calls)


# --- a whole run


def _run(tmp_path, monkeypatch, *arguments):
    monkeypatch.setenv("FLASH_PALLAS_COMMIT", "0123456789abcdef")
    out = tmp_path / "results.json"
    run.main(run.parse(["--suite", "smoke", "--out", str(out), "--rounds", "2", *arguments]))
    return out


def test_a_run_from_command_line_to_table(tmp_path, monkeypatch, capsys):
    wrong = providers.Provider("wrong", lambda cell: providers.Attention(lambda q, k, v: q + q))
    monkeypatch.setitem(providers.PROVIDERS, "wrong", wrong)
    names = "flash_pallas_xla,torch_cudnn,wrong"
    out = _run(tmp_path, monkeypatch, "--only", "full", "--providers", names)
    found = results.load(out)
    assert found["commit"] == "0123456789abcdef"
    assert found["versions"]["jax"] == jax.__version__
    rows = {(row["provider"], row["direction"]): row for row in found["rows"]}
    assert len(rows) == 6
    for direction in ("forward", "backward"):
        ours = rows["flash_pallas_xla", direction]
        assert ours["ms"] > 0
        assert ours["gate"]["ok"]
        assert ours["ratio_to_torch_cudnn"] is None
        assert "torch" in rows["torch_cudnn", direction]["refused"]
        assert rows["wrong", direction]["ms"] is None
        assert "wrong result" in rows["wrong", direction]["refused"]
    assert out.with_suffix(".csv").read_text().count("\n") == 7
    printed = capsys.readouterr().out
    assert printed.rindex("| 1,128,2,1,64 | full | backward |") > printed.rindex("ready")

    # The rest of the suite is added to the same file, and a file of something else is refused.
    _run(tmp_path, monkeypatch, "--append", "--providers", "flash_pallas_xla")
    rows = results.load(out)["rows"]
    assert [row["causal"] for row in rows] == [False] * 6 + [True] * 2
    out.write_text(out.read_text().replace("0123456789abcdef", "another"))
    with pytest.raises(ValueError, match="commit"):
        _run(tmp_path, monkeypatch, "--append", "--providers", "flash_pallas_xla")


@pytest.mark.thorough
def test_programs_traced_by_another_process_are_the_same(judged, monkeypatch, capsys):
    oracle, here = judged
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, spawn) as processes:
        ready = providers.prepare("flash_pallas_xla", CELL, jnp.bfloat16, processes)
        with pytest.raises(providers.Unsupported, match="cuDNN"):
            providers.prepare("jax_cudnn", CELL, jnp.bfloat16, processes)
        # What the other process cannot make (here: it does not know the name) is made by this one.
        monkeypatch.setitem(providers.PROVIDERS, "new", providers.PROVIDERS["flash_pallas_xla"])
        providers.prepare("new", CELL, jnp.bfloat16, processes)
    assert "new, 1,128,4,2,64 causal: traced here, since KeyError: 'new'" in capsys.readouterr().out
    there = ready(gate.random_inputs(SHAPE)).results()
    assert all(verdict.ok for verdict in oracle.check(there).values())
    for name, value in here.items():
        np.testing.assert_array_equal(value, there[name], err_msg=name)


def test_time_limit_starts_no_new_cell(tmp_path, monkeypatch, capsys):
    out = _run(tmp_path, monkeypatch, "--time-limit", "-1", "--providers", "flash_pallas_xla")
    assert not out.exists()
    assert "time is up" in capsys.readouterr().out


def test_unknown_provider_is_a_usage_error(capsys):
    with pytest.raises(SystemExit):
        run.parse(["--out", "x.json", "--providers", "flash_palas"])
    assert "flash_palas" in capsys.readouterr().err


# --- memory


@pytest.mark.thorough
def test_planned_memory_grows_linearly_in_ours(monkeypatch):
    monkeypatch.setattr(suites, "MEMORY_SHAPE", suites.Shape(1, 0, 1, 1, 64))
    lengths = (512, 1024, 2048)
    planned = [row["planned"] for row in memory.measure("flash_pallas_xla", lengths)]
    assert planned[2] - planned[1] < 2.5 * (planned[1] - planned[0])


def test_memory_stops_at_the_first_failure(monkeypatch):
    def fail_at_2048(provider, shape):
        if shape.q_len >= 2048:
            raise MemoryError("full")
        return {"planned": 1, "measured": 2}

    monkeypatch.setattr(memory, "measure_jax", fail_at_2048)
    rows = list(memory.measure("jax_xla", (4096, 1024, 2048)))
    assert [row["q_len"] for row in rows] == [1024, 2048]
    assert rows[0]["measured"] == 2
    assert rows[1]["refused"] == "MemoryError: full"


def test_memory_suite_keeps_rows_of_a_process_that_died(monkeypatch, tmp_path):
    script = tmp_path / "python"
    line = '{"provider": "a", "q_len": 1, "planned": 1, "measured": null, "refused": null}'
    script.write_text(f"#!/bin/sh\necho '{line}'\necho dead >&2\nexit 3\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    rows = memory.run_suite(["a"], (1, 2))
    assert [row["q_len"] for row in rows] == [1, None]
    assert "dead" in rows[1]["refused"]
