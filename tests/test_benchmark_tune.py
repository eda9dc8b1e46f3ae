"""The tool that makes the table of tile sizes shipped with the package, and that table."""

from __future__ import annotations

import functools
import json

import jax.numpy as jnp
import pytest

import flash_pallas as fp
from benchmarks import providers, suites, tune
from flash_pallas import tuning
from flash_pallas.backends.hopper import HopperBackend
from flash_pallas.backends.xla import XlaBackend
from flash_pallas.backends.xla.backend import XlaAttention
from flash_pallas.frontend import dispatch, tables


def test_the_shipped_table_holds_only_what_was_timed_and_still_fits():
    hopper = HopperBackend(interpret=True, num_sms=132)
    cells = {}
    for cell in suites.SUITES["h200"]:
        s = cell.shape
        q = jnp.broadcast_to(jnp.bfloat16(0), (s.batch, s.q_len, s.q_heads, s.head_dim))
        k = jnp.broadcast_to(jnp.bfloat16(0), (s.batch, s.kv_len, s.kv_heads, s.head_dim))
        problem = fp.explain(fp.flash_attention, q, k, k, causal=cell.causal, backend="xla").problem
        cells[tables.key("hopper", problem)] = problem
    for path in {tables._SHIPPED / name for name in tables._SHIPPED_FOR.values()}:
        table = json.loads(path.read_text())
        assert tables._well_formed(table) and table["jaxlib"] in ("0.11", "0.12")
        for name, entry in table["entries"].items():
            hopper.attention.plan(cells[name], entry["blocks"])  # raises where they do not fit
            assert all(entry["gain"][kernel] >= tuning.LEAST_GAIN for kernel in entry["blocks"])


class Tunable(XlaBackend):
    """A backend with two tile sizes; the second is faster, and wrong where there is a mask."""

    name = "tunable"

    @property
    def attention(self):
        return TunableAttention(self)


class TunableAttention(XlaAttention):
    def candidates(self, problem):
        return {"forward": [{"block_q": 16}, {"block_q": 8}]}

    def plan(self, problem, override=None):
        return super().plan(problem, (override or {}).get("forward", {"block_q": 16}))

    def run(self, spec, blocks, operands):
        out = super().run(spec, blocks, operands)
        wrong = blocks.block_q == 8 and spec.mask.right == 0
        return out._replace(o=out.o + out.o) if wrong else out


@pytest.fixture
def tunable(monkeypatch, tmp_path):
    """The Tunable backend, a provider of it, a suite that takes seconds, and a clock."""
    monkeypatch.setenv(tables.CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(dispatch, "BACKENDS", {"tunable": Tunable()})
    attention = lambda cell: providers.Attention(
        functools.partial(fp.flash_attention, causal=cell.causal, backend="tunable")
    )
    provider = providers.Provider("a backend that runs here", attention)
    monkeypatch.setitem(providers.PROVIDERS, "tunable", provider)
    small = suites.Shape(1, 32, 2, 1, 16)
    cells = tuple(suites.Cell(small, causal) for causal in (False, True))
    monkeypatch.setitem(suites.SUITES, "smoke", cells)
    monkeypatch.setattr(tuning, "TARGET_SECONDS", 0.0)
    monkeypatch.setattr(tuning, "milliseconds", lambda program: program.fields["block_q"])


@pytest.mark.thorough
@pytest.mark.usefixtures("tunable")
def test_the_tool_leaves_out_what_is_wrong(tmp_path, capsys):
    out = tmp_path / "table.json"
    tune.main(["--out", str(out), "--suite", "smoke"], "tunable", "tunable")
    (entry,) = json.loads(out.read_text())["entries"].items()
    assert "mask=" not in entry[0]
    assert entry[1] == {"blocks": {"forward": {"block_q": 8}}, "gain": {"forward": 2.0}}
    printed = capsys.readouterr().out
    assert "1,32,2,1,16 causal is left out: ['o'" in printed
    assert "1 of 2 calls differ" in printed
