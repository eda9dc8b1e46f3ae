"""The benchmarks of masks and modifiers: the pairs they call visible, and a run on a CPU."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import pathlib
import shutil
import sys
import types
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flash_pallas
from benchmarks import feature_programs, features, run_features, tables, timing
from benchmarks.peers import PEERS, Unsupported
from tests import flash_attention_3_stand_in

SMALL = features.Sizes(2, 96, 4, 2, 16, 8)


def visible_pairs(variant, sizes):
    """Finds visible (query, key) pairs by asking which values each query reads, for one head."""
    one = dataclasses.replace(
        sizes, batch=1, heads=1, kv_heads=1, head_dim=8, v_head_dim=sizes.length
    )
    q = jnp.zeros((1, sizes.length, 1, 8))
    v = jnp.eye(sizes.length)[None, :, None]
    o = variant.attention("xla")(q, q, v, variant.make(one, jax.random.key(0)))
    return np.asarray(o[0, :, 0] > 0)


@pytest.mark.parametrize("variant", [features.CAUSAL, features.PACKED], ids=lambda v: v.name)
def test_the_visible_share(variant):
    sizes = dataclasses.replace(SMALL, length=400)
    assert variant.visible(sizes) == pytest.approx(visible_pairs(variant, sizes).mean())


@pytest.mark.parametrize("length", [500, 1500])
def test_the_visible_share_of_a_window(length):
    i, j = np.arange(length)[:, None], np.arange(length)[None, :]
    expected = ((j <= i) & (i - j <= 1023)).mean()
    sizes = dataclasses.replace(SMALL, length=length)
    assert features.WINDOW.visible(sizes) == pytest.approx(expected)
    assert dict(features.WINDOW.static)["window"] == (1023, 0)


def test_documents_cover_the_length_unequally():
    counts = np.bincount(features.packed_ids(32768))
    assert len(counts) == features.DOCUMENTS and counts.sum() == 32768
    assert counts.max() > 1.5 * counts.min() > 0


def test_another_version_runs_calls_that_make_objects_of_their_own(tmp_path, monkeypatch):
    source, copy = pathlib.Path(flash_pallas.__file__).parent, tmp_path / "flash_pallas_copy"
    shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.syspath_prepend(tmp_path)
    sizes, other = features.Sizes(1, 512, 1, 1, 16, 16), importlib.import_module(copy.name)
    calls = {
        "flash_attention_varlen": f"causal, varlen of {features.DOCUMENTS} documents",
        "flash_attention": "block mask, causal",
    }
    for function, name in calls.items():
        spy = mock.Mock(wraps=getattr(other, function), __name__=function)
        monkeypatch.setattr(other, function, spy)
        found = feature_programs.export(sizes, VARIANTS[name], copy.name, backend="xla")
        assert found.forward.out_avals[0].shape == (1, 512, 1, 16)
        assert spy.called
    assert features.flash_pallas is flash_pallas


def test_a_version_without_a_function_does_not_run_this_one_instead(monkeypatch):
    monkeypatch.setitem(sys.modules, "empty_version", types.ModuleType("empty_version"))
    with pytest.raises(AttributeError, match="flash_attention"):
        feature_programs.export(SMALL, features.CAUSAL, "empty_version", backend="xla")


VARIANTS = {v.name: v for group in features.GROUPS for v in group.variants}


@pytest.mark.thorough(always=["full", "causal, kv_lengths"])
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_every_variant_runs_and_passes_its_gate(variant):
    one_sequence = dataclasses.replace(SMALL, batch=1)
    used = run_features.gate(variant, one_sequence if variant is features.VARLEN else SMALL, "xla")
    assert 0.1 < used["forward"] <= 1.0 and 0.1 < used["backward"] <= 1.0


@pytest.mark.thorough
def test_the_gate_of_float32_is_as_much_stricter(monkeypatch):
    sizes = dataclasses.replace(SMALL, dtype="float32")
    assert max(run_features.gate(features.CAUSAL, sizes, "xla").values()) < 1e-3
    right = features.Variant.attention
    slightly = lambda call: lambda *args: call(*args) * (1 + 1e-4)
    attention = lambda self, backend: (slightly if backend == "wrong" else lambda f: f)(
        right(self, "xla")
    )
    monkeypatch.setattr(features.Variant, "attention", attention)
    assert run_features.gate(features.CAUSAL, sizes, "wrong")["forward"] > 1.0
    assert run_features.gate(features.CAUSAL, SMALL, "wrong")["forward"] < 1.0


@pytest.mark.thorough
def test_gates_of_processes_are_those_of_this_one(monkeypatch):
    """Takes a group of GROUPS, which the gate cuts to its own length."""
    group = next(g for g in features.GROUPS if g.name == "block masks")
    expected = run_features.gate(group.variants[-1], group.sizes, "xla")
    place = features.GROUPS.index(group), len(group.variants) - 1
    with run_features.gates_apart(1) as processes:
        assert processes.submit(run_features.gate_of, *place, "xla").result() == expected


def test_the_gate_fails_what_is_wrong(monkeypatch):
    right = features.Variant.attention

    def wrong(self, backend):
        call = right(self, "xla")
        slightly = lambda *args: call(*args) * 1.02
        return slightly if backend == "wrong" else call

    monkeypatch.setattr(features.Variant, "attention", wrong)
    assert run_features.gate(features.CAUSAL, SMALL, "wrong")["forward"] > 1.0


@pytest.mark.thorough
def test_rows_of_a_group(monkeypatch, tmp_path):
    def refuse(variant, arrays, do):
        raise Unsupported("not here")

    monkeypatch.setitem(PEERS, "jax_cudnn", refuse)
    variants, peers = (features.FULL, features.PAIR_BIAS), ("jax_cudnn",)
    group = features.Group("pair", SMALL, variants, peers, whole=True)
    prepared = run_features.prepare(group, "xla")
    rows = run_features.run_group(group, prepared, timing.HostTimer(), 1)
    assert [(r["name"], r["direction"], r["refused"]) for r in rows] == [
        (name, direction, "Unsupported: not here" if name == "jax_cudnn" else None)
        for direction in ("forward", "backward")
        for name in ("full", features.PAIR_BIAS.name, "jax_cudnn")
    ]
    assert all(r["ms"] > 0 and r["speed"] > 0 for r in rows if r["refused"] is None)
    assert all(run_features.line(row) for row in rows)
    whole = [row.get("peak_bytes_both") for row in rows]
    assert whole[:3] == [None] * 3 and whole[5] is None  # what is refused comes last
    assert all(row["peak_bytes_both"] > rows[0]["peak_bytes"] for row in rows[3:5])


ONE = features.Sizes(1, 96, 4, 2, 16, 16)
FA3_CALLS = {
    features.VARLEN: ("flash_mha_varlen", (-1, -1), 3),
    features.WINDOW: ("flash_mha", (1023, 0), 4),
    features.SINKS: ("flash_mha", (-1, -1), 4),
}


def test_the_groups_of_flash_attention_3():
    found = [group for group in features.GROUPS if "fa3" in group.peers]
    assert {group.variants for group in found} == {(variant,) for variant in FA3_CALLS}
    assert {group.sizes.head_dim for group in found} == {64, 128}
    assert all(group.has("fa3") for group in found)


@pytest.mark.thorough(always=["causal, sinks"])
@pytest.mark.parametrize("variant", FA3_CALLS, ids=lambda v: v.name)
def test_flash_attention_3_is_called_as_it_wants(monkeypatch, variant):
    calls = flash_attention_3_stand_in.install(monkeypatch)
    group = features.Group("fa3", ONE, (variant,), ("fa3",))
    programs, refused, gates = run_features.prepare(group, "xla")
    assert not refused and set(programs) == set(gates) == {variant.name, "fa3"}
    name, window, rank = FA3_CALLS[variant]
    assert {call["name"] for call in calls} == {name}
    assert all(call["causal"] is True and call["window"] == window for call in calls)
    assert {len(shape) for call in calls for shape in call["shapes"]} == {rank}
    if variant is features.VARLEN:
        longest = int(np.bincount(features.packed_ids(ONE.length)).max())
        assert {(call["longest"], call["starts"]) for call in calls} == {(longest, (17,))}


def test_a_wrong_result_of_flash_attention_3_gets_no_number(monkeypatch):
    flash_attention_3_stand_in.install(monkeypatch)
    module = sys.modules["dew_flash_attn"]
    right = module.flash_mha
    monkeypatch.setattr(module, "flash_mha", lambda *given, **others: right(*given) * 1.02)
    group = features.Group("fa3", ONE, (features.CAUSAL,), ("fa3",))
    programs, refused, gates = run_features.prepare(group, "xla")
    assert set(programs) == {"causal"} and gates["fa3"]["forward"] > 1.0
    assert "wrong result" in refused["fa3"]


@pytest.mark.parametrize(
    ("variant", "sizes", "reason"),
    [
        (features.SOFTCAP, ONE, "has no softcap"),
        (features.PAIR_BIAS, ONE, "has no bias"),
        (features.WINDOW_ARRAY, ONE, "two Python integers"),
        (features.CAUSAL, dataclasses.replace(ONE, v_head_dim=8), "one head dim"),
        (features.CAUSAL, dataclasses.replace(ONE, dtype="float32"), "not float32"),
        (features.CAUSAL, dataclasses.replace(ONE, head_dim=264), "up to 256"),
        (features.VARLEN, dataclasses.replace(ONE, batch=2), "one entry of the batch"),
    ],
)
def test_flash_attention_3_says_what_it_cannot_do(monkeypatch, variant, sizes, reason):
    calls = flash_attention_3_stand_in.install(monkeypatch)
    *qkv, do = sizes.arrays()
    arrays = (*qkv, variant.make(sizes, jax.random.key(1)))
    with pytest.raises(Unsupported, match=reason):
        PEERS["fa3"](variant, arrays, do)
    assert not calls


@pytest.mark.thorough
def test_command_line(monkeypatch, tmp_path):
    group = features.Group("tiny", SMALL, (features.CAUSAL,))
    groups = (
        group,
        dataclasses.replace(group, name="tiny too"),
        dataclasses.replace(group, name="other"),
    )
    on_xla = functools.partial(run_features.prepare, backend="xla")
    monkeypatch.setattr(run_features, "GROUPS", groups)
    monkeypatch.setattr(run_features, "prepare", on_xla)
    monkeypatch.setattr(run_features, "prepare_process", lambda limit: None)
    monkeypatch.setattr(timing, "choose", lambda name, probes: (timing.HostTimer(), {}))
    monkeypatch.setattr(run_features, "probes", dict)
    out = tmp_path / "features.json"
    monkeypatch.setattr(sys, "argv", ["run_features", "--out", str(out), "--only", "tiny"])
    run_features.main()
    found = json.loads(out.read_text())
    assert found["suite"] == "features" and [row["group"] for row in found["rows"]] == [
        name for name in ("tiny", "tiny too") for _ in ("forward", "backward")
    ]


def test_a_run_of_some_groups_keeps_the_others():
    def timed(commit, *groups):
        rows = [
            {"group": "g", "shape": shape, "name": name, "direction": direction, "ms": ms}
            for shape, name, ms in groups
            for direction in ("forward", "backward")
        ]
        return {"commit": commit, "rows": rows}

    oldest = timed("a", ("1", "full", 1.0), ("1", "causal", 2.0), ("2", "full", 3.0))
    older = run_features.refreshed(oldest, timed("b", ("1", "causal", 4.0)))
    found = run_features.refreshed(older, timed("c", ("2", "full", 5.0), ("3", "full", 6.0)))
    assert found["commit"] == "c"
    assert [(row["shape"], row["name"], row["ms"], row.get("commit")) for row in found["rows"]] == [
        row
        for row in (
            ("1", "full", 1.0, "a"),
            ("1", "causal", 4.0, "b"),
            ("2", "full", 5.0, None),
            ("3", "full", 6.0, None),
        )
        for _ in range(2)
    ]
    # What is refused comes last: the same group in another order.
    again = timed("d", ("1", "causal", 7.0), ("1", "peer", 8.0))
    turned = timed("e", ("1", "peer", 9.0), ("1", "causal", 6.0))
    by_direction = lambda rows: sorted(rows, key=lambda row: row["direction"], reverse=True)
    again["rows"], turned["rows"] = by_direction(again["rows"]), by_direction(turned["rows"])
    assert run_features.refreshed(again, turned)["rows"] == turned["rows"]
    assert "4 of 8 rows are of earlier runs" in tables._of_other_commits(found)
    assert not tables._of_other_commits(timed("a", ("1", "full", 1.0)))


def test_the_table_keeps_groups_on_the_same_sizes_apart():
    row = {"group": "g", "shape": "1,2", "refused": None, "peak_bytes": 2**30, "speed": 0.5}
    rows = [
        row | {"name": name, "direction": direction, "ms": ms}
        for group, ms in (("full", 1.0), ("causal", 2.0))
        for direction in ("forward", "backward")
        for name in (group, "peer")
    ]
    del rows[1]["peak_bytes"]
    rows[2]["peak_bytes_both"] = 3 * 2**30
    rows.append(row | {"name": "absent", "direction": "backward", "refused": "not installed"})
    del rows[-1]["speed"], rows[3]["speed"]
    lines = tables._features_table({"rows": rows}).splitlines()
    assert lines[2:6] == [
        "| 1,2 | full | 1.00 (0.50) | 1.00 (0.50) | 1.00 | 1.00 | 3.00 |",
        "| 1,2 | peer | 1.00 (0.50) | 1.00 | - | 1.00 | - |",
        "| 1,2 | causal | 2.00 (0.50) | 2.00 (0.50) | 1.00 | 1.00 | - |",
        "| 1,2 | peer | 2.00 (0.50) | 2.00 (0.50) | 1.00 | 1.00 | - |",
    ]
    assert lines[-1] == "- absent: not installed (1 of the rows)"
