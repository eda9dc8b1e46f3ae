"""The benchmark of context parallelism: its traffic, its bounds, and a run to its tables."""

from __future__ import annotations

import concurrent.futures
import types

import jax
import jax.numpy as jnp
import pytest

from benchmarks import collectives, context, cupti, longest, results, run_parallel, tables
from benchmarks.context import KINDS, Kind, Setting

SIZES = (4, 2, 8)


@pytest.fixture
def setting(devices):
    return Setting.of(devices, SIZES, "xla")


def sent(setting, name, length=64):
    """Returns {name of the collective and dtype: bytes that a device sends in a step}."""
    kind = KINDS[name]
    found = {}
    for message, count in collectives.messages(setting.step(kind), setting.like(kind, length)):
        key = f"{message.name} {message.shapes.split('[')[0]}"
        found[key] = found.get(key, 0) + count * message.sent(setting.devices)
    return found


def test_bytes_that_a_step_sends(setting):
    k = 16 * 2 * 8 * 2  # of one device's keys: 16 tokens, 2 heads of 8 numbers of 16 bits
    # Keys and values go round twice, their gradients once in float32 and home from the last one.
    ring = {"ppermute bfloat16": 2 * 2 * 3 * k, "ppermute float32": 2 * 4 * 2 * k}
    assert sent(setting, "ring zigzag") == ring
    gathered = {"all_gather bfloat16": 2 * 3 * k, "reduce_scatter bfloat16": 2 * 3 * k}
    assert sent(setting, "all_gather zigzag") == gathered
    # Two key heads for four devices are repeated, so that all arrays are as large as q.
    assert sent(setting, "ulysses contiguous") == {"all_to_all bfloat16": 8 * 3 / 4 * 2 * k}


@pytest.mark.parametrize("name", ["ring zigzag", "all_gather zigzag", "ulysses contiguous"])
def test_every_repetition_of_a_collective_is_kept(setting, name):
    """Checks that XLA does not merge equal collectives, which would make the rate eightfold."""
    kind = KINDS[name]
    found = collectives.messages(setting.step(kind), setting.like(kind, 64))
    assert found
    for message, _ in found:
        function, like = message.program(setting.mesh, context.AXIS)
        hlo = function.lower(like).compile().as_text()
        assert collectives.kept(hlo) == collectives.REPEATS, message.key


def test_collectives_are_counted_in_hlo_of_a_gpu():
    hlo = """
  %start = (f32[8], f32[8]) collective-permute-start(%x), channel_id=1
  %done = f32[8] collective-permute-done(%start)
  %all-reduce.1 = f32[8] all-reduce(%done), to_apply=%sum
"""
    assert collectives.kept(hlo) == 2


@pytest.mark.parametrize(
    ("name", "mib", "gb_per_s"),
    [
        ("ppermute", 128, 136),
        ("ppermute", 1, 106),
        ("ppermute", 4096, 342),
        ("ppermute", 2**7.5, (136 * 5 + 342) / 6),  # half an octave of three above 128
        ("all_to_all", 128 * 4 / 3, 239),  # three quarters of it go to others
        ("reduce_scatter", 128 * 4 / 3, 255),
        ("all_gather", 128 / 3, 255),
        ("psum", 128 * 2 / 3, 255),
    ],
)
def test_published_rates(name, mib, gb_per_s):
    operand = types.SimpleNamespace(aval=jax.ShapeDtypeStruct((round(mib * 2**20),), jnp.int8))
    message = collectives.Message(name, "", types.SimpleNamespace(invars=[operand]))
    sent = message.sent(4)
    assert message.published_ms(4) == pytest.approx(sent / gb_per_s / 1e6, rel=1e-3)


@pytest.mark.parametrize(
    ("kind", "sending", "share"),
    [
        (Kind("ring", "zigzag"), 9.0, 1.0),
        (Kind("ring", "zigzag"), 20.0, 0.5),
        (Kind("ring", "contiguous"), 9.0, 4 / 7),
        (Kind("ulysses"), 10.0, 0.5),
    ],
)
def test_bounds(kind, sending, share):
    assert context.bound(kind, 4, 10.0, sending) == pytest.approx(share)


def test_overlap_is_counted_on_each_device():
    work = lambda start, end, name, device: cupti.Interval(start, end, name, device)
    found = context.overlap(
        [
            work(0, 4_000_000, "flash_pallas_forward", 0),
            work(3_000_000, 5_000_000, "ncclDevKernel_SendRecv", 0),
            work(6_000_000, 7_000_000, "fusion", 0),
            work(0, 2_000_000, "ncclDevKernel_SendRecv", 1),
            work(2_000_000, 9_000_000, "flash_pallas_forward", 1),
        ]
    )
    expected = {"sending": 2.0, "hidden": 0.5, "attention": 5.5, "other": 0.5, "whole": 8.0}
    expected["exposed"] = 1.5
    assert found == pytest.approx(expected)


def test_the_longest_sequence_lies_on_a_line():
    assert longest.fitting({8: 999, 16: 100 + 16, 32: 100 + 32}, 1000, 64) == 896


@pytest.mark.thorough
@pytest.mark.parametrize("name", context.FEATURES)
def test_a_feature_that_is_wrong_is_seen(monkeypatch, setting, name):
    kind = KINDS["ring zigzag"]
    assert 0 < setting.feature_error(kind, name, 64) <= 1
    step = lambda self, kind, real=Setting.step, **options: (
        real(self, kind) if kind.strategy else real(self, kind, **options)
    )
    monkeypatch.setattr(Setting, "step", step)  # the ring forgets it
    assert setting.feature_error(kind, name, 64) > 1


@pytest.mark.thorough
def test_a_run_to_its_tables(monkeypatch, tmp_path, devices):
    monkeypatch.setattr(run_parallel, "GATE_LENGTH", 16)
    monkeypatch.setattr(run_parallel, "READING_MS", 1)
    wrong = KINDS["ulysses contiguous"]
    named = Setting.named
    spoilt = lambda self, kind, x: named(self, kind, (x[0] * 2, x[1]) if kind == wrong else x)
    monkeypatch.setattr(Setting, "named", spoilt)
    out = tmp_path / "parallel.json"
    kinds = "one GPU,ring zigzag,ulysses contiguous"
    flags = ["--out", str(out), "--kinds", kinds, "--sizes", "4,2,8", "--backend", "xla"]
    flags += ["--lengths", "32,64", "--seconds", "0", "--memory", "0", "--gpus", "2"]
    run_parallel.run(run_parallel.parse([*flags, "--profile", "64", "--features"]))
    found = results.load(out)
    steps = [row for row in found["rows"] if row["what"] == "step" and row["q_len"] == 64]
    rows = {row["kind"]: row for row in steps}
    assert list(rows) == kinds.split(",")
    ring, alone = rows["ring zigzag"], rows["one GPU"]
    assert ring["share"] == pytest.approx(alone["ms"] / ring["ms"] / 2)
    assert ring["argument_bytes"] * 2 == alone["argument_bytes"] == 64 * 12 * 8 * 2
    assert "wrong result" in rows["ulysses contiguous"]["refused"]
    timed = [row for row in found["rows"] if row["what"] == "collective" and row["q_len"] == 64]
    assert timed and all(row["refused"] is None and row["gb_per_s"] > 0 for row in timed)
    assert ring["sending_ms"] > 0 and 0 < ring["bound"] <= 1
    features = {row["feature"]: row["gate"] for row in found["rows"] if row["what"] == "feature"}
    assert features.keys() == context.FEATURES.keys() and all(0 < g <= 1 for g in features.values())
    table = tables.render(found)
    assert "| 2 | 64 | ring zigzag |" in table and "| ring zigzag | dropout |" in table
    assert "- ulysses contiguous: wrong result" in table
    assert f"Sending alone, 2 GPUs: {collectives.RATES['measured']}." in table


def test_no_rate_where_xla_left_some_out(monkeypatch, setting):
    kind = KINDS["all_gather zigzag"]
    this = run_parallel.Run(setting, [kind], 0)
    monkeypatch.setattr(collectives, "kept", lambda hlo: 1)
    this.send(64)
    assert {row["refused"] for row in this.rows} == {"XLA left 1 of 8"}
    assert this.sent[kind, 64] == (sum(sent(setting, kind.name).values()), None)
    this.send(64, measured=False)
    assert len(this.rows) == 2  # those of before
    assert this.sent[kind, 64][1] == pytest.approx(this.sent[kind, 64][0] / 100e6)


def test_memory_is_filled(monkeypatch, setting):
    """Plans memory with a step in its line, as where sizes are rounded up."""
    asked = []

    def step(self, kind, length):
        asked.append((kind.name, length))
        future = concurrent.futures.Future()
        future.set_result(length)
        return future

    plan = lambda length: {"planned_bytes": 10 * length + (length > 20_000) * 50_000}
    monkeypatch.setattr(context.Workshop, "step", step)
    monkeypatch.setattr(context, "planned_bytes", plan)
    this = run_parallel.Run(setting, [KINDS["ring zigzag"]], 0)
    this.fill([4096, 8192], 1e6)
    (row,) = this.rows
    assert row["q_len"] == 4096 * 23 and row["planned_bytes"] == 992_080 <= 1e6
    assert ("ring zigzag", 4096 * 24) in asked  # does not fit


def test_runs_of_others_are_kept(tmp_path):
    path = tmp_path / "parallel.json"
    for gpus, length, ms in ((4, 32, 1.0), (2, 32, 2.0), (4, 32, 3.0), (4, 64, 4.0)):
        row = {"what": "step", "gpus": gpus, "q_len": length, "ms": ms}
        found = results.header("parallel", {"summary": "", "rates": str(ms)}) | {"rows": [row]}
        results.save(path, run_parallel.merged(path, found, gpus))
    found = results.load(path)
    assert [row["ms"] for row in found["rows"]] == [2.0, 3.0, 4.0]
    runs = [(run["gpus"], run["lengths"], run["rates"]) for run in found["runs"]]
    assert sorted(runs) == [(2, [32], "2.0"), (4, [32], "3.0"), (4, [64], "4.0")]
    with pytest.raises(ValueError, match="is of"):
        run_parallel.merged(path, found | {"device": "another"}, 2)
