"""The benchmarks' results: rows, files, tables and plots."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("matplotlib")

from benchmarks import (
    flops,
    gate,
    plot,
    results,
    run,
    suites,
    tables,
    timing,
)


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
    assert row["relative"] == {"torch_cudnn": 2.0}
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


def test_the_portable_kernels_are_held_against_flash_attention_2():
    found = _results()
    for row in found["rows"]:
        names = {"flash_pallas": "flash_pallas_portable", "tokamax": "torch_flash"}
        row.update(provider=names.get(row["provider"], row["provider"]))
        if row["provider"] == "torch_flash":
            row.update(refused=None, ms=1.1, tflops=500.0, gate=found["rows"][0]["gate"])
    ours = found["rows"][1]
    ours.update(relative={"torch_cudnn": 2.0, "torch_flash": 2.2})
    lines = tables.render(found).splitlines()
    assert lines[0].endswith("| torch_flash | portable / FlashAttention-2 |")
    assert lines[2].endswith("| 500 | 2.20 |")
    assert lines[3].endswith("| 500 | - |")  # of a run that did not say


def test_the_main_table_compares_each_cell_with_best_peer_and_gemm():
    found = _results(suite="h200")
    for row in found["rows"]:
        if row["provider"] == "flash_pallas":
            row.update(share_of_gemm=0.9)
            if row["direction"] == "backward":
                row.update(relative={"torch_cudnn": 1.18, "tokamax": 1.3, "flash_pallas_copy": 1.0})
    lines = tables.render(found).splitlines()
    assert lines[0].endswith("| flash_pallas | ours / best peer | ours / GEMM |")
    assert lines[2].endswith("(2.00) | 2.00 | 0.90 |")
    assert lines[3].endswith("(2.00) | 1.18 | 0.90 |")  # own variants are no peers
    assert "GEMM: a bfloat16 matmul" in "\n".join(lines)


@pytest.mark.parametrize(
    ("peer", "suite"), [("fa3", "fa3"), ("fa3", "h200"), ("fa4", "fa4"), ("fa4", "h200")]
)
def test_each_flash_attention_has_a_column_of_its_own(peer, suite):
    found = _results(suite=suite)
    for row in found["rows"]:
        if row["provider"] == "tokamax":
            row.update(provider=peer, refused=None, ms=1.1, tflops=500.0)
            row.update(gate=found["rows"][0]["gate"])
    found["rows"][1].update(relative={"torch_cudnn": 2.0, peer: 0.96})
    lines = tables.render(found).splitlines()
    assert lines[0].endswith(f" | ours / {peer} |") and lines[2].endswith(" | 0.96 |")
    assert lines[3].endswith(" | - |")  # of a run that did not say
    assert ("| 0.96 | - | 0.96 |" in lines[2]) == (suite == "h200")
    assert lines[0].count("ours / fa") == 1


def test_two_peers_have_two_columns():
    found = _results(suite="fa3")
    names = {"torch_cudnn": "fa4", "tokamax": "fa3"}
    for row in found["rows"]:
        row.update(provider=names.get(row["provider"], row["provider"]))
        row.update(refused=None, ms=1.1, tflops=500.0, gate=found["rows"][0]["gate"])
    found["rows"][1].update(relative={"fa3": 1.25, "fa4": 0.96})
    lines = tables.render(found).splitlines()
    assert lines[0].endswith(" | ours / fa3 | ours / fa4 |")
    assert lines[2].endswith(" | 1.25 | 0.96 |")


def test_a_main_table_without_ours_or_its_ratio_still_prints():
    found = _results(suite="h200")
    found["rows"][1].update(relative=None)
    assert tables.render(found).splitlines()[2].endswith("| - | - |")
    found["rows"] = [row for row in found["rows"] if row["provider"] != "flash_pallas"]
    assert "best peer" not in tables.render(found)


def test_memory_table_marks_what_was_not_measured():
    rows = [
        {"provider": "a", "q_len": 1024, "planned": 2**29, "measured": 2**30, "refused": None},
        {"provider": "a", "q_len": 2048, "planned": 2**31, "measured": None, "refused": None},
        {"provider": "b", "q_len": 1024, "planned": None, "measured": None, "refused": "too big"},
    ]
    lines = tables.render(_results(suite="memory", rows=rows)).splitlines()
    assert lines[2:4] == ["| 1k | 1.000 | - |", "| 2k | ~2.000 | - |"]
    assert "- b: too big (1 of the rows)" in lines


def test_the_decode_table_counts_operations_where_they_bind():
    call = {"group": "some", "shape": "1,2,3,4,5", "refused": None, "ms": 0.5, "provider": "a"}
    call |= {"gb_per_s": 1000.0, "of_ceiling": 0.25, "chosen": {"num_splits": 3}}
    rows = [call | {"call": "few", "tflops": 99.0}, call | {"call": "many", "tflops": 100.0}]
    lines = tables.render(_results(suite="decode", rows=rows)).splitlines()
    assert lines[0].endswith("| us | GB/s | TFLOP/s | splits |")
    assert lines[2] == "| some | 1,2,3,4,5 | few | 500.0 | 1000 (0.25) | - | 3 |"
    assert lines[3] == "| some | 1,2,3,4,5 | many | 500.0 | 1000 (0.25) | 100 | 3 |"
    # A file of a time when rows did not have them.
    older = [call | {"call": "T=1"}, call | {"ms": None, "refused": "too big"}]
    text = tables.render(_results(suite="decode", rows=older))
    assert "TFLOP/s" not in text and "- a: too big (1 of the rows)" in text


def test_the_serving_table_has_parts_without_rates():
    mix = {"mix": "steps and a chunk", "sequences": 33, "tokens": 2048, "refused": None}
    rows = [
        mix | {"call": "all in one call", "ms": 0.5, "speed": 1.0, "launches": 6.25}
        | {"tflops": 426.3, "gb_per_s": 1927.4},
        mix | {"call": "its steps alone", "ms": 0.25, "speed": 2.0, "launches": 6.0},
        mix | {"call": "its chunks alone", "ms": None, "refused": "wrong result"},
    ]  # fmt: skip
    text = tables.render(_results(suite="serving", rows=rows))
    assert text.splitlines()[2:4] == [
        "| steps and a chunk | 33 | 2k | all in one call | 500.0 | 1.00 | 426 | 1927 | 6.2 |",
        "| steps and a chunk | 33 | 2k | its steps alone | 250.0 | 2.00 | - | - | 6.0 |",
    ]
    assert "- steps and a chunk, its chunks alone: wrong result (1 of the rows)" in text


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
    plot.plot_results(_results(suite="charts"), tmp_path / "charts.svg")
    assert "head dim 128, causal" in (tmp_path / "charts_backward.svg").read_text()
    assert (tmp_path / "charts_forward.svg").exists()
    plot.plot_results(_results(suite="memory", rows=rows), tmp_path / "memory.svg")
    for name in ("flash", "cudnn"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "loss.csv").write_text("step,loss\n1,5.5\n2,4.5\n")
    paths = [tmp_path / name / "loss.csv" for name in ("flash", "cudnn")]
    plot.plot_losses(paths, tmp_path / "losses.png")
    assert (tmp_path / "bars.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "memory.svg").read_text()
