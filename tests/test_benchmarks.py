"""The benchmarks' own logic: what a number is made of, and that a wrong result gets none."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import json
import struct
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("matplotlib")

from benchmarks import (
    cupti,
    flops,
    gate,
    memory,
    plot,
    providers,
    results,
    run,
    suites,
    tables,
    timing,
)

SHAPE = suites.Shape(1, 128, 4, 2, 64)
CELL = suites.Cell(SHAPE, True)


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
    assert all(c.shape.reason for cells in suites.SUITES.values() for c in cells)
    assert suites.MEMORY_LENGTHS[0] == 1024
    assert suites.MEMORY_LENGTHS[-1] == 128 * 1024


# --- cupti


def test_busy_time_is_a_union():
    make = lambda *pairs: [cupti.Interval(a, b, "x") for a, b in pairs]
    assert cupti.busy_ns(make((10, 20), (30, 40))) == 20
    assert cupti.busy_ns(make((30, 40), (10, 35))) == 30
    assert cupti.busy_ns(make((10, 40), (20, 30))) == 30
    assert cupti.busy_ns([]) == 0


def _record(kind: int, start: int, end: int, name: bytes | None = None):
    """An activity record as cupti_activity.h lays it out, and the string that it points to."""
    text = ctypes.create_string_buffer(name) if name else None
    address = ctypes.addressof(text) if text else 0
    return struct.pack("<I12xQQ72xQ", kind, start, end, address), text


class FakeCupti:
    """A CUPTI that delivers the given records when it is flushed."""

    def __init__(self, records, enable_status=0):
        self.records, self.enable_status = records, enable_status
        self.enabled, self.log = set(), []

    def cuptiActivityRegisterCallbacks(self, requested, completed):
        self.requested, self.completed = requested, completed
        return 0

    def cuptiActivityEnable(self, kind):
        self.enabled.add(kind)
        return self.enable_status

    def cuptiActivityDisable(self, kind):
        self.enabled.remove(kind)
        return 0

    def cuptiActivityFlushAll(self, flag):
        assert flag == 1
        buffer, size, most = ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_size_t(7)
        self.requested(ctypes.pointer(buffer), ctypes.pointer(size), ctypes.pointer(most))
        assert most.value == 0
        data = b"".join(self.records)
        assert len(data) <= size.value
        ctypes.memmove(buffer.value, data, len(data))
        self.addresses = [
            buffer.value + offset
            for offset in itertools.accumulate(map(len, self.records), initial=0)
        ][:-1]
        self.completed(None, 0, buffer, size.value, len(data))
        return 0

    def cuptiActivityGetNextRecord(self, buffer, valid, record):
        del buffer, valid
        if not self.addresses:
            return 12
        record._obj.value = self.addresses.pop(0)
        return 0

    def cuptiGetResultString(self, status, message):
        del status
        message._obj.value = b"CUPTI_ERROR_FAKE"
        return 0


def test_recorder_reads_kernels_memsets_and_copies(monkeypatch):
    kernel, text = _record(10, 1000, 3000, b"attention")
    fake = FakeCupti([kernel, _record(2, 500, 800)[0], _record(1, 0, 100)[0], _record(4, 0, 9)[0]])
    monkeypatch.setattr(cupti, "_load", lambda: fake)
    recorder = cupti.Recorder()
    for _ in range(2):
        with recorder.record() as intervals:
            assert fake.enabled == {1, 2, 10}
        assert intervals == [(1000, 3000, "attention"), (500, 800, "memset"), (0, 100, "memcpy")]
        assert not fake.enabled
    assert text.value == b"attention"


def test_recorder_names_the_call_that_failed(monkeypatch):
    fake = FakeCupti([], enable_status=39)
    monkeypatch.setattr(cupti, "_load", lambda: fake)
    recorder = cupti.Recorder()
    message = r"cuptiActivityEnable: CUPTI_ERROR_FAKE \(39\)"
    with pytest.raises(cupti.CuptiError, match=message), recorder.record():
        pass


# --- timing


class FakeTimer:
    """Reads durations that the launches themselves announce; keeps the order of readings."""

    name = "fake"

    def __init__(self):
        self.order = []

    def measure(self, launch, iterations):
        name, ms = launch.run()
        self.order.append((name, iterations))
        return timing.Sample(ms, 3.0)


def _contestants(**durations):
    def make(name, ms):
        if isinstance(ms, list):
            steps = iter(ms)
            return timing.Launch(lambda: (name, next(steps)), "jax")
        return timing.Launch(lambda: (name, ms), "jax")

    return {name: make(name, ms) for name, ms in durations.items()}


def test_rounds_are_interleaved_and_rotate():
    timer = FakeTimer()
    samples, failures = timing.interleave(timer, _contestants(a=10.0, b=20.0, c=1.0), rounds=4)
    assert not failures
    assert {name: len(found) for name, found in samples.items()} == {"a": 4, "b": 4, "c": 4}
    rounds = [name for name, _ in timer.order[6:]]
    assert ["".join(rounds[i : i + 3]) for i in range(0, 12, 3)] == ["abc", "bca", "cab", "abc"]
    assert dict(timer.order[6:]) == {"a": 3, "b": 2, "c": 30}


def test_a_contestant_that_raises_drops_out_and_the_others_go_on():
    timer = FakeTimer()
    # The iterator ends in the second round, after two pilots and one reading.
    found, failures = timing.interleave(timer, _contestants(a=1.0, b=[1.0, 1.0, 1.0]), rounds=3)
    assert set(found) == {"a"}
    assert len(found["a"]) == 3
    assert set(failures) == {"b"}


def test_ratio_is_taken_within_rounds():
    # Both slow down threefold: the ratio of every round is 2, that of the medians is not.
    yardstick = [timing.Sample(ms, 1) for ms in (2.0, 4.0, 60.0)]
    mine = [timing.Sample(ms, 1) for ms in (1.0, 2.0, 30.0)]
    assert timing.speed_ratio(yardstick, mine) == 2.0
    assert timing.median_and_spread([1.0, 2.0, 3.0, 4.0, 5.0]) == (3.0, pytest.approx(2 / 3))
    assert timing.median_and_spread([7.0]) == (7.0, 0.0)


def test_iterations_fill_a_reading():
    assert timing.iterations_for(1.0) == 30
    assert timing.iterations_for(1000.0) == 2
    assert timing.iterations_for(0.0) == 100


def test_kineto_reads_device_events_only():
    events = [
        {"ph": "X", "cat": "kernel", "ts": 1.5, "dur": 2.0, "name": "k"},
        {"ph": "X", "cat": "gpu_memset", "ts": 4, "dur": 1, "name": "m"},
        {"ph": "X", "cat": "cuda_runtime", "ts": 0, "dur": 99, "name": "launch"},
        {"ph": "M", "name": "process_name"},
    ]
    assert timing.KinetoTimer.intervals(events) == [(1500, 3500, "k"), (4000, 5000, "m")]


def test_a_timer_that_loses_work_is_not_chosen(monkeypatch):
    class Deaf:
        name = "deaf"

        def measure(self, launch, iterations):
            return timing.Sample(1e-9, 1.0)

    monkeypatch.setitem(timing.TIMERS, "cupti", Deaf)
    monkeypatch.setattr(timing, "torch_or_none", lambda: None)
    probes = {"sum": timing.Launch(lambda: jnp.ones(8).sum(), "jax")}
    timer, log = timing.choose("auto", probes)
    assert isinstance(timer, timing.HostTimer)
    assert "of the wall time" in log["cupti"]
    assert "torch" in log["kineto"]
    with pytest.raises(RuntimeError, match="does not work here"):
        timing.choose("cupti", probes)


def test_host_timer_measures_time():
    product = jax.jit(jnp.dot)
    launch = lambda n: timing.Launch(lambda: product(jnp.ones((n, n)), jnp.ones((n, n))), "jax")
    timer = timing.HostTimer()
    timer.measure(launch(16), 1), timer.measure(launch(1024), 1)
    assert timer.measure(launch(1024), 3).ms > timer.measure(launch(16), 3).ms > 0


# --- the gate


@pytest.fixture(scope="module")
def judged():
    inputs = gate.random_inputs(SHAPE)
    runner = providers.flash_pallas_runner(CELL, inputs, backend="xla")
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


# --- a whole run


def _run(tmp_path, monkeypatch, *arguments):
    monkeypatch.setenv("FLASH_PALLAS_COMMIT", "0123456789abcdef")
    out = tmp_path / "results.json"
    run.main(run.parse(["--suite", "smoke", "--out", str(out), "--rounds", "2", *arguments]))
    return out


def test_a_run_from_command_line_to_table(tmp_path, monkeypatch, capsys):
    wrong = lambda cell, inputs: providers.jax_runner(lambda q, k, v: q + q, inputs)
    monkeypatch.setitem(providers.PROVIDERS, "wrong", providers.Provider("wrong", wrong))
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


def test_time_limit_starts_no_new_cell(tmp_path, monkeypatch, capsys):
    out = _run(tmp_path, monkeypatch, "--time-limit", "-1", "--providers", "flash_pallas_xla")
    assert not out.exists()
    assert "time is up" in capsys.readouterr().out


def test_unknown_provider_is_a_usage_error(capsys):
    with pytest.raises(SystemExit):
        run.parse(["--out", "x.json", "--providers", "flash_palas"])
    assert "flash_palas" in capsys.readouterr().err


# --- results, tables, plots


def _results(**changes):
    header = {
        "schema": results.SCHEMA,
        "suite": "quick",
        "date": "2026-01-01",
        "commit": "c" * 40,
        "device": "Fake GPU",
        "driver": "1",
        "versions": {"jax": "0"},
        "method": {"summary": "How.", "timer": "fake"},
    }
    cell = suites.SUITES["quick"][1]
    verdict = gate.Verdict((0.1, 0.01), (0.2, 0.02))
    samples = {
        "torch_cudnn": [timing.Sample(1.0, 1.0)] * 3,
        "flash_pallas": [timing.Sample(0.5, 2.0)] * 3,
    }
    rows = [
        run.make_row(cell, direction, name, samples, refused, {"o": verdict, "dq": verdict})
        for direction in run.DIRECTIONS
        for name, refused in [
            ("torch_cudnn", None),
            ("flash_pallas", None),
            ("tokamax", "unsupported: not installed"),
        ]
    ]
    return header | {"rows": rows} | changes


def test_a_row_has_the_promised_fields():
    row = _results()["rows"][1]
    assert row["ratio_to_torch_cudnn"] == 2.0
    assert row["ms"] == 0.5
    assert row["launches"] == 2.0
    assert row["gate"] == {
        "ok": True,
        "tensor": "o",
        "error": 0.1,
        "bound": 0.2,
        "tensors": {"o": {"error": (0.1, 0.01), "bound": (0.2, 0.02)}},
    }


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda found: found.pop("device"), "lack"),
        (lambda found: found.update(schema=0), "schema"),
        (lambda found: found["rows"][0].pop("ms"), "fields"),
        (lambda found: found["rows"][0].update(ms=None), "reason"),
        (lambda found: found["rows"][0].update(gate=None), "gate"),
        (lambda found: found["rows"][0]["gate"].update(ok=False), "gate"),
    ],
)
def test_a_file_of_another_form_is_refused(tmp_path, spoil, message):
    found = _results()
    results.check(found)
    spoil(found)
    with pytest.raises(ValueError, match=message):
        results.save(tmp_path / "x.json", found)


def test_files_are_plain_json(tmp_path):
    found = _results()
    found["rows"][0]["launches"] = float("nan")
    results.save(tmp_path / "x.json", found)
    assert json.loads((tmp_path / "x.json").read_text())["rows"][0]["launches"] is None


def test_table_shows_ratio_and_reasons():
    text = tables.render(_results())
    lines = text.splitlines()
    assert lines[0] == "| B,T,N,K,H | mask | pass | torch_cudnn | flash_pallas |"
    forward = flops.tflops(suites.SUITES["quick"][1].shape, True, "forward", 1.0)
    expected = f"| 4,4096,16,16,128 | causal | forward | {forward:.0f} | {2 * forward:.0f} (2.00) |"
    assert lines[2] == expected
    assert "- tokamax: unsupported: not installed (2 of the rows)" in text
    assert "Fake GPU" in text and "c" * 12 in text and "c" * 13 not in text


def test_memory_table_marks_what_was_not_measured():
    rows = [
        {"provider": "a", "q_len": 1024, "planned": 2**29, "measured": 2**30, "refused": None},
        {"provider": "a", "q_len": 2048, "planned": 2**31, "measured": None, "refused": None},
        {"provider": "b", "q_len": 1024, "planned": None, "measured": None, "refused": "too big"},
    ]
    lines = tables.render(_results(suite="memory", rows=rows)).splitlines()
    assert lines[2:4] == ["| 1k | 1.000 | - |", "| 2k | ~2.000 | - |"]
    assert "- b: too big (1 of the rows)" in lines


def test_table_goes_between_its_markers():
    document = "a\n<!-- table:x -->\nold\n<!-- end -->\nb\n<!-- table:y -->\nkeep\n<!-- end -->\n"
    expected = document.replace("old", "new \\1")
    assert tables.replace(document, "x", "new \\1\n") == expected
    assert tables.replace(expected, "x", "new \\1\n") == expected
    with pytest.raises(ValueError, match="table:z"):
        tables.replace(document, "z", "new")


def test_plots_are_written(tmp_path):
    rows = [
        {"provider": "a", "q_len": n, "planned": n << 20, "measured": None, "refused": None}
        for n in (1024, 2048)
    ]
    plot.plot_results(_results(), tmp_path / "bars.png")
    plot.plot_results(_results(suite="memory", rows=rows), tmp_path / "memory.svg")
    for name in ("flash", "cudnn"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "loss.csv").write_text("step,loss\n1,5.5\n2,4.5\n")
    paths = [tmp_path / name / "loss.csv" for name in ("flash", "cudnn")]
    plot.plot_losses(paths, tmp_path / "losses.png")
    assert (tmp_path / "bars.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "memory.svg").read_text()


# --- memory


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
