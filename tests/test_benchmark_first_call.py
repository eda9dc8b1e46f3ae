"""First calls in fresh processes: what a row says, what a process tells, and who is refused."""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import pytest

from benchmarks import first_calls, results, run_first_call, training_tables

TELL = "import os; from benchmarks.first_calls import tell; "


@pytest.fixture
def here(monkeypatch):
    """Answers in this process; returns the questions. A cached program takes half as long."""
    asked = []

    def answer(arguments, work, name, folder):
        asked.append((work, name, folder))
        if name == "jax_cudnn":
            return {"failed": "RuntimeError: none here"}
        found = run_first_call.measure(work, name, arguments.size)
        return {x: (0.5 if name.endswith("cached") else 1.0) for x in found}

    monkeypatch.setattr(run_first_call, "answer", answer)
    return asked


@pytest.mark.thorough(always=["forward", "gradient"])
@pytest.mark.parametrize("work", run_first_call.WORK)
def test_a_run_to_its_table(here, work, tmp_path, capsys):
    out = tmp_path / "first_call.json"
    words = ["--out", str(out), "--size", "tiny", "--rounds", "2", "--work", work]
    words += ["--contestants", "flash_pallas;jax_cudnn;flash_pallas, cached"]
    run_first_call.main(run_first_call.parse(words))
    rows = {row["provider"]: row for row in results.load(out)["rows"]}
    assert rows["jax_cudnn"]["refused"] == "RuntimeError: none here"
    assert rows["jax_cudnn"]["first_s"] is None
    ours, cached = rows["flash_pallas"], rows["flash_pallas, cached"]
    assert (ours["first_s"], cached["first_s"]) == (4.0, 2.0) and ours["rounds"] == [4.0, 4.0]
    assert cached["relative"] == {"flash_pallas": 0.5, "flash_pallas, cached": 1.0}
    assert (
        f"| {work} | flash_pallas | 1.00 | 1.00 | 1.00 | 1.00 | 4.00 |" in capsys.readouterr().out
    )
    # One process more fills the cache, and another is refused once.
    counts = {name: sum(name == other for _, other, _ in here) for name in rows}
    assert counts == {"flash_pallas": 2, "jax_cudnn": 1, "flash_pallas, cached": 3}


def test_the_yardstick_of_a_cached_program_is_cached():
    whole = {"flash_pallas, cached": [6.0, 9.0], "jax_cudnn": [2.0, 3.0]}
    whole["jax_cudnn, cached"] = [1.0, 3.0]
    found = {
        name: [dict.fromkeys(run_first_call.PHASES, seconds / 4) for seconds in each]
        for name, each in whole.items()
    }
    row = run_first_call.row("forward", "flash_pallas, cached", found, None)
    assert row["relative"]["jax_cudnn, cached"] == (6 + 3) / 2
    table = run_first_call.tables.render(
        results.header("first_call", {"summary": ""}) | {"rows": [row]}
    )
    assert "| 4.50 |" in table


def test_each_phase_is_measured():
    found = run_first_call.measure("forward", "flash_pallas", "tiny")
    assert tuple(found) == run_first_call.PHASES and min(found.values()) > 0


def test_an_exported_program_is_not_traced_again(tmp_path):
    traced = []

    def square(tree):
        traced.append(tree)
        return {"square": tree["x"] ** 2}

    x = {"x": jnp.arange(3.0)}
    for _ in range(2):  # the second as another process would
        function = first_calls.Exported(jax.jit(square), tmp_path / "program")
        _, seconds, (found,) = first_calls.first_run(function, x)
        assert found.tolist() == [0, 1, 4] and tuple(seconds) == first_calls.PHASES
        assert len(traced) == 1


@pytest.mark.parametrize("end", [training_tables.CACHED, training_tables.EXPORTED])
def test_kept_programs_are_compared_with_those_kept_the_same_way(end):
    row = {"work": "forward", "provider": f"flash_pallas{end}", "refused": None, "spread": 0.0}
    row |= dict.fromkeys((*run_first_call.PHASES, "first_s"), 1.0)
    row["relative"] = {"jax_cudnn": 3.0, f"jax_cudnn{end}": 2.0}
    assert training_tables.render_first_calls({"rows": [row]}).splitlines()[2].endswith("| 2.00 |")


@pytest.mark.parametrize(
    ("code", "found"),
    [
        (TELL + "print('x'); tell({'a': 1.5})", {"a": 1.5}),
        (TELL + "tell({'a': os.environ['B']})", {"a": "c"}),
        ("raise ValueError('no such thing')", {"failed": "ValueError: no such thing"}),
        ("pass", {"failed": "no output"}),
        ("import time; time.sleep(60)", {"failed": "no answer in 0.5 s"}),
    ],
)
def test_what_a_fresh_process_tells(code, found):
    patience = 0.5 if "sleep" in code else 60
    assert first_calls.fresh_process([sys.executable, "-c", code], patience, {"B": "c"}) == found


def test_unknown_names_are_refused(capsys):
    with pytest.raises(SystemExit):
        run_first_call.parse(["--out", "x.json", "--work", "backward"])
    assert "unknown ['backward']" in capsys.readouterr().err
