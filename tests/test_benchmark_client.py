"""Training steps of a client: arguments, turns and rows. The client itself is not needed.

Programs stand in for the compiled ones of MaxText: they add to a number what they cost.
"""

from __future__ import annotations

import argparse

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import results, run_client, steps


def parsed(tmp_path, *words: str) -> argparse.Namespace:
    return run_client.parse(["--out", str(tmp_path / "client.json"), *words])


@pytest.fixture
def order(monkeypatch) -> list[str]:
    """The names of the programs in the order of their steps; dot_product cannot be compiled."""
    taken: list[str] = []

    def compiled(arguments, provider, batch):
        if provider == "dot_product":
            raise NotImplementedError("not here\nand more")

        def step(state, given):
            assert given is batch
            taken.append(provider)
            return state + 1, jnp.float32(10 - state)

        return run_client.Program(provider, lambda: 0, step, 1.5, 1024)

    monkeypatch.setattr(run_client, "compile_program", compiled)
    monkeypatch.setattr(run_client.importlib.metadata, "version", lambda name: f"{name} 1")
    return taken


def test_programs_take_turns_on_one_state(tmp_path, order):
    arguments = parsed(tmp_path, "--size", "tiny", "--length", "8", "--rounds", "4", "--steps", "2")
    batch = run_client.batch_of(arguments)
    programs = {x: run_client.compile_program(arguments, x, batch).step for x in ("a", "b")}
    found = steps.in_turns(programs, 0, batch, 4, 2)
    assert {name: len(x) for name, x in found.items()} == {"a": 4, "b": 4}
    # A step that is not timed and two that are; no order comes more often than another.
    assert order[::3] == list("abbabaab") and len(order) == 24


def test_a_run_is_saved_with_the_reason_of_what_cannot_run(tmp_path, order):
    own = ("--own", "flash,dot_product")
    arguments = parsed(tmp_path, "--size", "tiny", "--length", "8", "--check-steps", "3", *own)
    run_client.main(arguments)
    found = results.load(arguments.out)
    rows = {row["provider"]: row for row in found["rows"]}
    assert rows["dot_product"]["refused"] == "NotImplementedError: not here"
    assert set(rows) == {"flash_pallas", "flash", "dot_product"}
    for name in ("flash_pallas", "flash"):
        row = rows[name]
        assert row["first_losses"] == [10, 9, 8] and len(row["step_ms_of_rounds"]) == 6
        speed = arguments.batch * arguments.length / row["step_ms"] * 1e3
        np.testing.assert_allclose(row["tokens_per_second"], speed, rtol=1e-6)
    assert found["suite"] == "client" and found["method"]["client"]["maxtext"] == "maxtext 1"


def test_documents_are_packed_one_behind_the_other(tmp_path):
    arguments = parsed(tmp_path, "--size", "tiny", "--length", "7", "--documents", "3")
    batch = run_client.batch_of(arguments)
    np.testing.assert_array_equal(batch["segment_ids"][1], [1, 1, 1, 2, 2, 2, 3])
    np.testing.assert_array_equal(batch["positions"][0], [0, 1, 2, 0, 1, 2, 0])
    assert batch["tokens"].max() < run_client.SIZES["tiny"]["vocab_size"]
    assert run_client.batch_of(parsed(tmp_path, "--length", "7"))["segment_ids"] is None


def test_what_ignores_segment_ids_gets_no_packed_documents(tmp_path, capsys):
    assert parsed(tmp_path).own == ["cudnn_flash_jax", "flash"]
    assert parsed(tmp_path, "--documents", "4").own == ["flash"]
    for words in (("--documents", "2", "--own", "cudnn_flash_jax"), ("--own", "splash")):
        with pytest.raises(SystemExit):
            parsed(tmp_path, *words)
    assert "ignores segment ids" in capsys.readouterr().err
