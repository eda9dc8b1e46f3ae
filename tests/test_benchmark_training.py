"""Benchmarks of training: layouts compute the same, and what rows say of time and communication."""

from __future__ import annotations

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import (
    collectives,
    flops,
    llama,
    plot,
    results,
    run_sharded_training,
    run_training,
    sharded,
    suites,
    tables,
)

from . import cudnn_stand_in

TINY = llama.Config(2, 16, 4, 2, 8, 32, 64, dtype=jnp.float32)
BATCH, LENGTH = 4, 32
# Adam divides each gradient by its own size: those near zero are all rounding, and two steps of
# RATE each may go either way. The loss is a mean of float32 numbers.
ATOL, RTOL = 4 * llama.RATE, 1e-5
CUDNN = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn")


@pytest.fixture
def tiny(monkeypatch):
    """Sizes that compile in seconds, by the name "tiny"; cross-entropy in four chunks."""
    monkeypatch.setitem(llama.SIZES, "tiny", TINY)
    monkeypatch.setattr(llama, "CHUNK", BATCH * LENGTH // 4)
    return TINY


def trained(config, layout, attend, policy=None):
    """Trains two steps; returns parameters, losses and norms."""
    with sharded.within(layout):
        step = llama.step_of(config, layout, attend, policy)
        state = llama.state_maker(config, layout)()
        batch = llama.batch_of(config, BATCH, LENGTH, layout)
        found = []
        for _ in range(2):
            state, numbers = step(state, batch)
            found.append([float(x) for x in numbers])
    return jax.device_get(state["parameters"]), np.asarray(found)


def way_of(**axes):
    return sharded.Way(tuple(axes.items()))


WAYS = [way_of(fsdp=2, model=2), way_of(data=2, context=2), way_of(sequence=2), way_of(data=2)]


@pytest.mark.thorough
@pytest.mark.parametrize("types", sharded.TYPES)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_layouts_compute_the_same(tiny, eight_devices, way, types):
    alone = llama.Layout()
    attend = sharded.attention("flash_pallas", alone)
    parameters, numbers = trained(tiny, alone, attend)
    assert numbers[1, 0] < numbers[0, 0]
    layout = sharded.Job(way, types, "flash_pallas", BATCH, LENGTH).layout()
    attend = sharded.attention("flash_pallas", layout)
    found, again = trained(tiny, layout, attend, llama.keeps_attention)
    np.testing.assert_allclose(again, numbers, rtol=RTOL)
    close = functools.partial(np.testing.assert_allclose, rtol=0, atol=ATOL)
    jax.tree.map(close, found, parameters)


@pytest.mark.thorough
def test_a_loop_computes_what_a_scan_does(tiny):
    attend = sharded.attention("flash_pallas", llama.Layout())
    _, scanned = trained(tiny, llama.Layout(), attend)
    _, looped = trained(dataclasses.replace(tiny, scan=False), llama.Layout(), attend)
    np.testing.assert_allclose(looped, scanned, rtol=RTOL)


def test_the_loss_is_that_of_whole_logits(tiny):
    layout = llama.Layout()
    shapes = (BATCH, LENGTH, 16), (16, 64)
    x, head = (jax.random.normal(jax.random.key(1), shape) for shape in shapes)
    targets = llama.batch_of(tiny, BATCH, LENGTH, layout)["targets"]
    logits = jax.nn.log_softmax(jnp.einsum("btd,dv->btv", x, head))
    expected = -jnp.take_along_axis(logits, targets[..., None], axis=-1).mean()
    assert llama.chunks_of(BATCH * LENGTH, LENGTH) == 4
    found = llama.cross_entropy(layout, x, head, targets)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("attention", ["flash_pallas", "jax_cudnn"])
def test_remat_runs_attention_once_where_its_output_is_kept(tiny, attention):
    """Counts forwards in the gradient of one layer, which has no others."""
    config = dataclasses.replace(tiny, layers=1, scan=False, dtype=jnp.bfloat16)
    attend = CUDNN if attention == "jax_cudnn" else sharded.attention(attention, llama.Layout())
    names = {"jax_cudnn": "dot_product_attention_fwd_wrapper"}
    name = names.get(attention, "name=flash_attention_out")

    def forwards(policy):
        loss = functools.partial(llama.loss_of, config, llama.Layout(), attend, policy)
        parameters = jax.eval_shape(functools.partial(llama.initial_state, config))["parameters"]
        make = functools.partial(llama.batch_of, config, BATCH, LENGTH, llama.Layout())
        batch = jax.eval_shape(make)
        return str(jax.make_jaxpr(jax.grad(loss))(parameters, batch)).count(name)

    with cudnn_stand_in.installed():
        assert (forwards(None), forwards(llama.keeps_attention)) == (2, 1)


def test_flops_of_a_step():
    shape = suites.Shape(2, 8, 4, 2, 16)
    pairs = 2 * 4 * (8 * 9 // 2)
    expected = 6 * 1000 * 2 * 8 + 3 * 6 * 2 * 16 * pairs
    assert flops.training_flops(1000, 3, shape) == expected
    forward = flops.attention_flops(dataclasses.replace(shape), True, "forward")
    assert flops.training_flops(0, 1, shape) == 3 * forward
    # Embedding and norms are in no matmul.
    leaves = jax.eval_shape(functools.partial(llama.initial_parameters, TINY), jax.random.key(0))
    counted = {n: x.size for n, x in leaves.items() if n != "embed" and "norm" not in n}
    assert TINY.matmul_parameters == sum(counted.values())
    assert 1.0e9 < llama.SIZES["1b"].matmul_parameters < 1.1e9


# --- one GPU


@pytest.fixture
def here(monkeypatch, tiny):
    """Answers in this process instead of another one; "wrong" does not hide later tokens."""
    attend = functools.partial(run_training._jax_nn, implementation="xla", is_causal=False)
    wrong = run_training.Contestant(lambda q, k, v: 3 * attend(q, k, v))
    monkeypatch.setitem(run_training.CONTESTANTS, "wrong", wrong)

    def answer(arguments, what, names):
        if names == ["jax_cudnn"]:
            return {"failed": "RuntimeError: none here"}
        asked = type(arguments)(**(vars(arguments) | {"contestants": names}))
        return json.loads(json.dumps(getattr(run_training, what)(asked)))

    monkeypatch.setattr(run_training, "answer", answer)


def test_a_run_to_its_table(here, tmp_path, capsys):
    out = tmp_path / "training.json"
    words = ["--out", str(out), "--size", "tiny", "--tokens", "32", "--rounds", "2"]
    words += ["--seconds", "0", "--reading", "0", "--check-steps", "2", "--lengths", "32"]
    words += ["--contestants"]
    run_training.main(run_training.parse([*words, "flash_pallas;wrong;jax_cudnn"]))
    rows = {row["provider"]: row for row in results.load(out)["rows"]}
    assert "wrong result" in rows["wrong"]["refused"] and rows["wrong"]["ms"] is None
    assert rows["jax_cudnn"]["refused"] == "RuntimeError: none here"
    ours = rows["flash_pallas"]
    assert ours["tokens_per_s"] == pytest.approx(32e3 / ours["ms"]) and ours["rounds"] == 2
    parts = [ours[name] for name in ("trace_s", "lower_s", "compile_s", "run_s")]
    assert ours["first_s"] == pytest.approx(sum(parts)) and min(parts) > 0
    assert ours["losses"][1] < ours["losses"][0] and ours["relative"] == {"flash_pallas": 1.0}
    assert "| 32 | 1 | flash_pallas |" in capsys.readouterr().out
    plot.plot_results(results.load(out), tmp_path / "training.png")


def test_a_ratio_is_to_the_same_remat():
    kept = f"jax_cudnn{run_training.KEPT}"
    row = {"provider": f"flash_pallas{run_training.KEPT}", "length": 32, "batch": 1, "ms": 2.0}
    row |= {"relative": {"jax_cudnn": 1.25, kept: 1.125}, "tokens_per_s": 16e3, "tflops": 0.5}
    row |= dict.fromkeys(("trace_s", "lower_s", "compile_s", "run_s", "first_s"), 0.0)
    row |= {"peak_bytes": 2**30, "losses": [1.0], "refused": None}
    found = results.header("training", {"summary": ""}) | {"rows": [row]}
    assert "| 16,000 | 1.125 | 2 |" in tables.render(found)


def test_other_lengths_stay(tmp_path):
    path = tmp_path / "training.json"
    for length, ms in ((32, 1.0), (64, 2.0), (32, 3.0)):
        row = {"length": length, "layers_as": "scan", "ms": ms}
        found = results.header("training", {"summary": ""}) | {"rows": [row]}
        results.save(path, run_training.merged(path, found))
    assert [row["ms"] for row in results.load(path)["rows"]] == [3.0, 2.0]


# --- several GPUs


def test_ways_divide_what_they_are_meant_for():
    names = lambda devices, *shape: [w.name for w in sharded.ways(devices) if w.fits(*shape)]
    assert names(1, 1, 64) == names(1, 4, 64) == ["one GPU"]
    assert names(2, 4, 64) == ["data 2", "fsdp 2", "model 2"]
    assert names(2, 1, 64) == ["context 2", "sequence 2"]
    assert names(4, 4, 64) == ["data 4", "fsdp 4", "model 4", "fsdp 2, model 2"]
    assert "fsdp 2, context 2" in names(4, 2, 64)


HLO = """
%body (x: f32[8]) -> f32[8] {
  %x = bf16[4,1024]{1,0} parameter(0)
  %g = (bf16[4,1024]{1,0}, bf16[8,1024]{1,0}) all-gather-start(%x), replica_groups=[2,2]<=[4]
  ROOT %r = bf16[4,1024]{1,0} all-reduce(%x), replica_groups=mesh['a'=2,'b'=2] {'a','b'}
}

ENTRY %main.1 (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  %b = f32[16]{0} reduce-scatter(%a), replica_groups={{0,1,2,3}}, to_apply=%add
  ROOT %w = f32[8]{0} while(%a), body=%body, backend_config={"known_trip_count":{"n":"22"}}
}
"""


def test_collectives_in_loops_are_counted():
    half = 4 * 1024 * 2
    gather, reduce, scatter = (
        collectives.Sent("all-gather", half, 2),
        collectives.Sent("all-reduce", half, 4),
        collectives.Sent("reduce-scatter", 32, 4),
    )
    assert collectives.in_hlo(HLO, 4) == {gather: 22, reduce: 22, scatter: 1}
    assert (gather.sent, reduce.sent, scatter.sent) == (half, 1.5 * half, 24)


@pytest.mark.parametrize("kind", collectives._KINDS)
def test_rates_are_of_collectives_that_all_run(devices, kind):
    function, like = collectives.rate_program(kind, 4096, devices)
    text = function.lower(like).compile().as_text()
    assert collectives.kept(text) == collectives.REPEATS
    (sent,) = collectives.in_hlo(text, 4)
    assert (sent.kind, sent.nbytes) == (kind, 2 * 4096)  # XLA widens bfloat16 on a CPU


@pytest.mark.thorough
@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize(("scaling", "growth"), [("weak", 2), ("strong", 1)])
def test_a_sharded_run_to_its_table(tmp_path, monkeypatch, eight_devices, scaling, growth):
    def no_cupti():
        raise OSError("none here")

    monkeypatch.setattr(run_sharded_training.cupti, "Recorder", no_cupti)
    out = tmp_path / "sharded.json"
    words = ["--out", str(out), "--size", "tiny", "--shapes", "2x32", "--seconds", "0"]
    words += ["--reading", "0", "--devices", "1,2", "--types", "auto", "--workers", "1"]
    words += ["--providers", "flash_pallas", "--only", "one GPU;model"]
    words += ["--scaling", scaling]
    found = run_sharded_training.main(run_sharded_training.parse(words))
    alone, model = (row for row in found["rows"] if row["what"] == "step")
    assert alone["speedup"] == 1.0 and model["refused"] is None
    assert model["speedup"] == pytest.approx(growth * alone["ms"] / model["ms"])
    divided = growth * alone["ms"] / 2
    assert model["reckoned_ms"] == pytest.approx(divided + model["sending_ms"])
    assert model["sent"]["all-reduce"]["calls"] >= 5 * TINY.layers
    assert any(row["what"] == "link" and row["gb_per_s"] > 0 for row in found["rows"])
    assert f"| {2 * growth} x 32 | model 2 | auto | flash_pallas |" in tables.render(found)
    plot.plot_results(found, tmp_path / "ways.png")
    # A second run replaces its own rows, and no others.
    again = run_sharded_training.merged(out, found | {"rows": [alone | {"ms": 1.0}]})
    assert sorted(row["ms"] for row in again["rows"] if row["what"] == "step")[0] == 1.0
    assert len(again["rows"]) == len(found["rows"])


def test_a_sharding_whose_result_is_wrong_gets_no_time(tmp_path):
    arguments = run_sharded_training.parse(["--out", str(tmp_path / "x.json"), "--size", "tiny"])
    this = run_sharded_training.Run(arguments)
    job = sharded.Job(sharded.Way(), "auto", "flash_pallas", 1, 32)
    assert this.differs(job, 5.0, 1.0) is None and this.differs(job, 5.01, 1.0) is None
    assert "wrong result: norm 1.01" in this.differs(job, 5.0, 1.01)
