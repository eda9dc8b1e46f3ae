"""Benchmarks of training steps: what they compare computes the same, and what their rows say."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import results, run_jax, run_stack, tables, timing

TOKENS = 40


@pytest.fixture(autouse=True)
def promotion():
    """Lets Flax promote dtypes, as users do."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture
def small(monkeypatch):
    """Makes the stack's sizes those of a moment on a CPU, with a window that hides keys."""
    sizes = {"WIDTH": 32, "VOCABULARY": 16, "WINDOW": 8, "HEADS": 4, "DTYPE": jnp.float32}
    local, wide = (16, 2), (32, 1)
    layers = {"LOCAL": local, "GLOBAL": wide, "LAYERS": (local, wide)}
    for name, value in (sizes | layers).items():
        monkeypatch.setattr(run_stack, name, value)
    monkeypatch.setattr(run_stack.Stack, "layers", (local, wide))
    return local, wide


@pytest.mark.thorough
def test_the_stacks_compute_the_same(small):
    tokens = jax.random.randint(jax.random.key(0), (1, TOKENS + 1), 0, run_stack.VOCABULARY)
    stack = run_stack.Stack(run_stack.flash_attention, small)
    params = stack.init(jax.random.key(1), tokens[:, :8])
    found = {
        attention: jax.jit(run_stack.step_of(attention, small))(params, tokens)
        for attention in (run_stack.flash_attention, run_stack.dense)
    }
    (ours, grads), (dense, expected) = found.values()
    np.testing.assert_allclose(ours, dense, rtol=1e-6)
    for x, y in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


@pytest.mark.thorough
def test_a_window_is_of_local_layers(small):
    tokens = jax.random.randint(jax.random.key(0), (1, TOKENS + 1), 0, run_stack.VOCABULARY)
    losses = []
    for layers in ((small[0],), (small[1],)):
        stack = run_stack.Stack(run_stack.dense, layers)
        params = stack.init(jax.random.key(1), tokens[:, :8])
        # What a token far before the last contributes to the last one's loss.
        changed = tokens.at[0, 0].set((tokens[0, 0] + 1) % run_stack.VOCABULARY)
        last = lambda t, p=params, s=stack: s.apply(p, t[:, :-1])[0, -1]
        losses.append(float(np.abs(last(tokens) - last(changed)).max()))
    assert losses[0] == 0.0 and losses[1] > 0.0


@pytest.mark.thorough
def test_rows_of_a_stack(small, tmp_path):
    options = ["--out", str(tmp_path / "x.json"), "--lengths", "32", "--rounds", "2"]
    arguments = run_stack.parse(options)
    rows = run_stack.rows(arguments, timing.HostTimer())
    assert [row["provider"] for row in rows] == ["flash_attention", "dense jnp"]
    assert all(row["tokens_per_s"] == pytest.approx(32e3 / row["ms"]) for row in rows)
    assert rows[0]["loss"] == pytest.approx(rows[1]["loss"], rel=1e-6)
    found = results.header("stack", {"summary": "a summary"}) | {"rows": rows}
    assert "| 1,32 | flash_attention |" in tables.render(found)


def test_versions_of_jax_take_turns(monkeypatch, tmp_path):
    times = {"": iter([(1.0, 4.0), (3.0, 4.0), (2.0, 4.0)]), "new": iter([(2.2, 3.0)] * 3)}
    order = []

    def measured(folder, arguments):
        order.append(folder)
        same = dict.fromkeys(run_jax.KEYS)
        rows = [same | {"ms": ms} for ms in next(times[folder])]
        return {"rows": rows, "method": {"timer": "none"}, "versions": {}}

    monkeypatch.setattr(run_jax, "measured", measured)
    out = tmp_path / "found.json"
    monkeypatch.setattr("sys.argv", ["run_jax", "--paths", "a=", "b=new", "--out", str(out)])
    run_jax.main()
    found = json.loads(out.read_text())
    assert order == ["", "new", "new", "", "", "new"]
    assert [row["time_ratio"]["b"] for row in found["rows"]] == pytest.approx([1.1, 0.75])
    told = found["method"]["of all cells"]["b"]
    assert told == pytest.approx({"geometric mean": (1.1 * 0.75) ** 0.5, "largest": 1.1})
