"""The list of calls that run on GPUs: what it holds, what it calls right, how its processes end."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import os
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flash_pallas as fp
from flash_pallas.coverage import calls, check, command, dense, digests, expected, rows, run
from flash_pallas.coverage.calls import Row
from flash_pallas.coverage.rows import TARGETS, Target

from .interpreter import race_checked


class Jnp(Target):
    """Target of blockwise jnp, which needs no GPU."""

    @contextlib.contextmanager
    def placed(self):
        """Leaves the process as it is."""
        yield None


class Stuck(Jnp):
    """Target whose calls never end."""

    @contextlib.contextmanager
    def placed(self):
        """Waits longer than a row may take."""
        time.sleep(600)
        yield None


class Gone(Jnp):
    """Target whose calls end the process."""

    @contextlib.contextmanager
    def placed(self):
        """Ends it, as a fault in machine code does."""
        os._exit(1)
        yield None


JNP = Jnp("xla", "", 1, interpret=True)


def of(function: str, wanted: str, *options: str, dtype: str = "bfloat16", H: int = 24) -> Row:
    return Row("xla", function, wanted, H, 16, dtype, options)


# --- The list -------------------------------------------------------------------------------------


def found_in(target: str, make) -> list[Row]:
    """Returns the rows of one part of the list that the target's backend runs."""
    return [row for row in make(target, TARGETS[target]) if rows.plan(row, TARGETS[target])]


@pytest.mark.parametrize("target", ["portable-227", "portable-163", "portable-99"])
def test_portable_decoding_is_run_at_every_head_dim(target):
    found = found_in(target, rows._decodes)
    dims = lambda *options: {row.head_dim for row in found if row.options == options}
    # GPUs with 99 KB have no room for wider ones, in eight bits before they are widened.
    widest, widest_raw = (560, 512) if target == "portable-99" else (577, 577)
    for options in ((), ("24 rows", "pages of 64", *rows.DECODE_ALL)):
        assert dims(*options) >= set(range(16, widest, 16))
    for cache in calls.EIGHT_BITS:
        whole = cache, "24 rows", "pages of 64", "scales of rows", *rows.DECODE_ALL
        assert dims(cache) >= set(range(32, widest_raw, 32)) <= dims(*whole)
    options = {name for row in found for name in row.options}
    assert options >= {*rows.DECODE, "drafts", "shared prefix", "64 heads", "scales"} - {"blocks"}
    assert {512, 256, 64} <= {r.v_head_dim for r in found if r.head_dim == 576} or widest < 576


@pytest.mark.thorough(always=["portable-99"])
@pytest.mark.parametrize("target", ["hopper", "portable-99"])
def test_attention_is_run_at_every_head_dim(target):
    found = found_in(target, rows._gradients)
    dims = lambda *options: {row.head_dim for row in found if row.options == options}
    assert dims() >= set(range(8, 513, 8))
    assert target != "hopper" or dims("deterministic") >= set(range(8, 257, 8))
    told = {name for row in found for name in row.options} - set(calls.LONG)
    assert told >= {*rows.ALONE, "deterministic"}
    assert {row.dtype for row in found} >= {"bfloat16", "float16"}
    assert {(192, 128), (512, 128), (64, 256)} <= {(r.head_dim, r.v_head_dim) for r in found}


@pytest.mark.parametrize("targets", [("hopper",), rows.PORTABLE], ids=["hopper", "portable"])
def test_everything_is_run_at_every_head_dim(targets):
    dims = set()
    for target in targets:
        of = functools.partial(Row, target, "attention", "gradient")
        every = [of(h, h, "bfloat16") for h in range(8, 513, 8)]
        all_of_it = rows._all(TARGETS[target], every, rows.EVERYTHING)
        dims |= {row.head_dim for row in all_of_it if rows.plan(row, TARGETS[target])}
    assert dims == set(range(8, 513, 8))


def test_portable_rows_with_the_same_tiles_are_run_once():
    both = {name: TARGETS[name] for name in ("portable-227", "portable-163")}
    row = Row("portable-163", "decode", "output", 64, 64, "bfloat16")
    twin = dataclasses.replace(row, target="portable-227")
    assert rows.plan(row, both["portable-163"]) == rows.plan(twin, both["portable-227"])


def test_a_problem_for_another_head_dim_is_that_of_its_call():
    for options in ((), rows.EVERYTHING):
        row = Row("portable-99", "attention", "gradient", 72, 40, "bfloat16", options)
        assert rows.problem_of(row) == calls.explained(row, "xla").problem
    row = Row("hopper", "decode", "output", 576, 512, "bfloat16", ("values in keys",))
    assert rows.problem_of(row) == calls.explained(row, "xla").problem
    row = Row("hopper", "ragged", "output", 128, 64, "bfloat16", ("int8", "pages of 64"))
    assert rows.problem_of(row) == calls.explained(row, "xla").problem


# --- What is right --------------------------------------------------------------------------------

RIGHT = (
    of("attention", "gradient", dtype="float16"),
    of("attention", "gradient", *rows.EVERYTHING),
    of("attention", "gradient", "softcap", "hiding bias"),
    of("attention", "gradient", "causal", "large logits"),
    of("attention", "gradient", *rows.LISTED),
    of("attention", "gradient", "positions", "segments", "bias of queries"),
    of("attention", "gradient", "causal at an offset", "traced window"),
    of("attention", "tangents", "causal", "softcap", "bias", "sinks", "GQA"),
    of("attention", "linear", "score_mod", "ALiBi", "dropout"),
    of("attention", "hessian", "causal", "softcap"),
    of("varlen", "gradient", *rows.VARLEN),
    of("varlen", "gradient", "causal", "ALiBi"),
    of("decode", "output", *rows.DECODE_ALL),
    of("decode", "output", "traced offset", "window", "pages of 128"),
    of("decode", "output", "24 rows", "drafts", "traced window", "ALiBi"),
    of("decode", "output", "blocks"),
    of("decode", "output", "values in keys", "pages of 64", "shared prefix"),
    of("decode", "output", "int8", "24 rows", "pages of 64", "scales of rows", *rows.DECODE_ALL),
    of("ragged", "output", "pages of 64", *rows.RAGGED_ALL),
    of("ragged", "output", "pages of 16", "steps of 4", "float8_e4m3fn", "scales of rows"),
    of("ragged", "output", "pages of 64", "steps of 8"),
    of("ragged", "output", "pages of 64", "steps of 8", "int8", "scales"),
)


@pytest.mark.thorough(
    always=[
        of("attention", "gradient", *rows.LISTED).key,
        of("decode", "output", "24 rows", "drafts", "traced window", "ALiBi").key,
        of("ragged", "output", "pages of 64", *rows.RAGGED_ALL).key,
    ]
)
@pytest.mark.parametrize("row", RIGHT, ids=lambda row: row.key)
def test_jnp_is_right(row):
    result = check.run(row, JNP)
    assert result.verdict == check.RIGHT, result


@pytest.mark.interpret
def test_an_interpreted_kernel_is_right():
    target = dataclasses.replace(TARGETS["portable-99"], interpret=True, num_sms=2)
    row = Row("portable-99", "decode", "output", 32, 32, "bfloat16", ("24 rows", "window"))
    with race_checked():
        result = check.run(row, target)
    assert result.verdict == check.RIGHT, result


def test_a_result_that_is_off_is_wrong():
    row = of("attention", "gradient", "causal")
    arrays, moves = check.arrays_of(row)
    right = expected.Expected(row, arrays, moves)
    verdict = lambda found: check.compared(row, "", found, right, arrays).verdict
    assert verdict(right.exact) == check.RIGHT
    for name, x in right.exact.items():
        for value in (np.nan, 1.1 * np.abs(x[np.isfinite(x)]).max()):
            off = x.copy()
            off[0, 1, 1] = value
            assert verdict({**right.exact, name: off}) == check.WRONG, name
        assert verdict({**right.exact, name: x * (1.0 + 2.0**-5)}) == check.WRONG, name


def test_sums_that_are_rounded_elsewhere_are_right():
    row = of("attention", "gradient", "lengths", "ALiBi", "sinks", "score_mod")
    arrays, moves = check.arrays_of(row)
    right = expected.Expected(row, arrays, moves)
    rounded = dense.to(row.dtype)
    # As kernels do that multiply weights by another number than the sum over their row.
    found = dense.gradients(*expected.described(row, arrays), lambda x: rounded(1.2 * x) / 1.2)
    for name in expected.SUMS:
        assert found[name].shape == right.exact[name].shape
        assert np.abs(found[name] - right.exact[name]).max() <= right.allowed[name], name
        off = {**right.exact, name: 1.25 * right.exact[name]}
        assert check.compared(row, "", off, right, arrays).verdict == check.WRONG, name


def test_tangents_are_differences():
    row = of("attention", "hessian", *rows.EVERYTHING)
    arrays, moves = check.arrays_of(row)
    call, x = expected.described(row, arrays)
    moves = {name: np.asarray(y).astype(np.float64) for name, y in moves.items()}
    for function in (dense.outputs, dense.gradients):
        found = dense.tangents(function, call, x, moves)
        ends = [
            function(call, x | {name: x[name] + h * moves[name] for name in moves})
            for h in (1e-5, -1e-5)
        ]
        with np.errstate(invalid="ignore"):
            for name in ends[0]:
                slope = np.nan_to_num((ends[0][name] - ends[1][name]) / 2e-5)
                tangent = found[f"{name}_tangent"]
                np.testing.assert_allclose(tangent, slope, atol=1e-6 * np.abs(slope).max())


def test_dropped_weights_are_those_of_the_package():
    q = k = v = jnp.ones((2, 40, 2, 16))
    eye = jnp.broadcast_to(jnp.eye(40)[None, :, None], (2, 40, 2, 40))
    o = fp.flash_attention(q, k, eye, dropout_rate=0.3, dropout_seed=7, backend="xla")
    place = np.tile(np.arange(40), (2, 1))
    kept = dense.kept(7, 0.3, 2, 2, (place, place))
    np.testing.assert_allclose(np.moveaxis(np.asarray(o), 1, 2) * 40, kept, atol=1e-5)
    assert 0.25 < np.mean(kept == 0.0) < 0.35 and v.shape == k.shape


# --- Digests --------------------------------------------------------------------------------------


def lowered(lines: int, **options):
    """Lowers a call that stands so many lines further down, in a file of another name."""
    text = "\n" * lines + "def call(q):\n    return attention(q, q, q)\n"
    names = {"attention": lambda *x: fp.flash_attention(*x, backend="portable", **options)}
    exec(compile(text, f"/elsewhere/{lines}.py", "exec"), names)
    with TARGETS["portable-99"].placed():
        x = jax.ShapeDtypeStruct((1, 64, 1, 16), jnp.bfloat16)
        return jax.jit(names["call"]).trace(x).lower(lowering_platforms=("cuda",))


def test_a_digest_is_of_the_kernel_and_not_of_its_place():
    first = lowered(0)
    assert len(digests.of(first)) == digests.LENGTH and digests.of(first) == digests.of(lowered(9))
    assert digests.of(first) != digests.of(lowered(0, causal=True))
    assert all(".py" not in text and "arch_major" not in text for text in digests.texts_of(first))
    assert digests.of(jax.jit(jnp.sin).lower(1.0)) == ""


# --- Processes ------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_a_row_that_hangs_or_ends_its_process_is_told(monkeypatch):
    monkeypatch.setattr(run, "LIMIT", 5.0)
    targets = {"stuck": Stuck("xla", "", 1), "gone": Gone("xla", "", 1), "xla": JNP}
    good = dataclasses.replace(of("decode", "output"), target="xla")
    wanted = [dataclasses.replace(good, target=name) for name in ("stuck", "gone")]
    found: list[check.Result] = []
    run.Run(targets, {}, found.append, processes=1).over(wanted)
    assert {r.key.split()[0]: (r.verdict, r.why) for r in found} == {
        "stuck": (check.HANGS, "took more than 5 s"),
        "gone": (check.HANGS, "ended its process"),
    }


def test_results_are_kept_and_read_back(tmp_path):
    path = tmp_path / "found.json"
    right = check.Result("a: plain", "012345678901", check.RIGHT, 0.4567, "o: maximum")
    run.lines_of(path).write_text(run.line(right, "before"))
    assert run.read(path) == {"a: plain": ["012345678901", 0.46, "right"]}
    run.write(path, run.read(path), {"device": "NVIDIA H200", "sources": "before"})
    assert not run.lines_of(path).exists() and run.of_sources(path, "before") == {"a: plain"}
    hangs = check.Result("b: plain", "", check.HANGS, None, "took more than 5 s")
    run.lines_of(path).write_text(run.line(hangs, "now") + '{"key": "c: pl')
    assert run.read(path).keys() == {"a: plain", "b: plain"}
    assert run.of_sources(path, "now") == {"b: plain"}
    run.mend(path)
    assert run.lines_of(path).read_text() == run.line(hangs, "now")
    assert run.counts(run.read(path)) == "1 right, 0 wrong, 1 hangs, 0 fails"
    assert len(run.sources()) == 12


def test_a_run_goes_on_where_it_stopped(tmp_path, capsys, monkeypatch):
    """Rows of these sources are left out; those of other sources only lower."""
    for name in run.ENVIRONMENT:
        monkeypatch.setenv(name, os.environ.get(name, ""))
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"])
    given = argparse.Namespace(out=tmp_path / "found.json", only=[], processes=1, minutes=9.0)
    row, targets = of("decode", "output"), {"xla": JNP}
    found = command.over([row], targets, given)
    assert found[row.key][-1] == check.RIGHT and "1 rows: 1 right" in capsys.readouterr().out
    monkeypatch.setattr(run.Run, "over", lambda self, rows: pytest.fail() if list(rows) else None)
    assert command.over([row], targets, given) == found
