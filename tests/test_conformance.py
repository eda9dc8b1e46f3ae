"""The conformance checker: what is right, wrong, refused and not offered; its table on the site."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import flash_pallas as fp
from benchmarks import run_conformance
from flash_pallas import __main__, conformance
from flash_pallas.conformance import CASES, NOT_OFFERED, REFUSED, RIGHT, WRONG

ROOT = Path(__file__).parent.parent
BY_NAME = {case.name: case for case in CASES}


def attention(q, k, v, *, is_causal=False, window_size=None, bias=None, past=0):
    """Computes attention; `past` shows keys that causal hides, which is wrong."""
    s = jnp.einsum("...tnh,...snh->...nts", q, k) / q.shape[-1] ** 0.5
    s = s if bias is None else s + bias
    i, j = jnp.arange(s.shape[-2])[:, None], jnp.arange(s.shape[-1])[None]
    seen = (j <= i + past) | (not is_causal)
    if window_size is not None:
        seen &= (j >= i - window_size[0]) & (j <= i + window_size[1])
    seen = jnp.broadcast_to(seen, s.shape)
    p = jax.nn.softmax(jnp.where(seen, s, -jnp.inf), axis=-1).astype(q.dtype)
    return jnp.einsum("...nts,...snh->...tnh", p, v)


def verdict(function, name, **fixed):
    (found,) = conformance.check(function, [BY_NAME[name]], dtype="float32", **fixed)
    return found


@pytest.mark.thorough(always=["causal", "bias", "query offset", "mask, queries without keys"])
@pytest.mark.parametrize("name", BY_NAME)
def test_flash_attention_is_right(name):
    found = verdict(fp.flash_attention, name)
    assert found.verdict == RIGHT and found.error <= found.allowed, found


@pytest.mark.parametrize("name", ["causal", "causal window", "bias"])
def test_names_of_other_libraries_are_understood(name):
    assert verdict(attention, name).verdict == RIGHT


def test_a_name_that_means_something_else_is_not_taken():
    def slides(q, k, v, sliding_window=None):
        return attention(q, k, v)

    found = verdict(slides, "causal window")
    assert (found.verdict, found.detail) == (NOT_OFFERED, "causal, window")


def test_a_function_that_is_wrong():
    found = verdict(attention, "causal", past=1)
    assert found.verdict == WRONG and found.error > 100 * found.allowed
    assert "wrong" in str(found) and f"allowed {found.allowed:.2g}" in str(found)


def test_a_gradient_that_is_wrong():
    stopped = lambda q, k, v: attention(q, jax.lax.stop_gradient(k), v)
    found = verdict(stopped, "full")
    assert (found.verdict, found.detail) == (WRONG, "dk")
    assert verdict(lambda q, k, v, bias: attention(q, k, v), "bias").verdict == WRONG


def test_a_result_of_another_dtype_or_with_nan():
    found = verdict(lambda q, k, v: attention(q, k, v).astype(jnp.bfloat16), "full")
    assert found.detail == "o is bfloat16[2, 48, 4, 32], expected float32[2, 48, 4, 32]"
    found = verdict(lambda q, k, v: attention(q, k, v).at[0, 0].set(jnp.nan), "full")
    assert (found.verdict, found.error) == (WRONG, None) and found.detail.endswith("has NaN")


def test_a_function_that_refuses_and_one_that_does_not_offer():
    def refuses(q, k, v):
        raise NotImplementedError("not for you\nreally")

    found = verdict(refuses, "full")
    assert (found.verdict, found.detail) == (REFUSED, "NotImplementedError: not for you")
    found = verdict(attention, "packed documents")
    assert (found.verdict, found.detail) == (NOT_OFFERED, "q_segment_ids, kv_segment_ids")


def test_any_options_are_passed_by_our_names():
    assert verdict(lambda q, k, v, **options: fp.flash_attention(q, k, v, **options), "window")
    found = verdict(lambda q, k, v, **_: (fp.flash_attention(q, k, v), None), "full")
    assert found.verdict == RIGHT  # the first of a tuple


@pytest.mark.parametrize(("fill", "told"), [(0.0, "0"), (3.0, "something else")])
def test_what_queries_without_keys_return_is_told(fill, told):
    def filled(q, k, v, mask):
        seen = mask.any(-1)[:, 0, :, None, None]
        return jnp.where(seen, fp.flash_attention(q, k, v, mask=mask), fill)

    found = verdict(filled, "mask, queries without keys")
    assert (found.verdict, found.detail) == (RIGHT, f"queries without keys return {told}")
    mean = verdict(jax.nn.dot_product_attention, "mask, queries without keys")
    assert mean.detail.endswith("return the mean of the values")


def test_cases_have_names_of_their_own_and_real_options():
    assert len(BY_NAME) == len(CASES) >= 30
    options = {name for case in CASES for name in case.options}
    fields = {field.name for field in dataclasses.fields(fp.reference.Modifiers)}
    assert options <= fields and {"bias", "window", "sinks", "q_offset"} <= options


def test_the_command_line(capsys, monkeypatch):
    name = "jax.nn:dot_product_attention"
    assert conformance.main([name, "--only", "full", "--with", "implementation=xla"]) == 0
    told = capsys.readouterr().out
    assert told.startswith("full ") and f"{name}: 1 right, 0 wrong" in told
    monkeypatch.setattr("sys.argv", ["x", "conformance", f"{__name__}:attention", "--json"])
    monkeypatch.setattr(conformance, "CASES", (BY_NAME["GQA"], BY_NAME["softcap"]))
    assert __main__.main() == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["verdict"] for each in found] == [REFUSED, NOT_OFFERED]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["jax.nn"], "'jax.nn' must be module:function, as in"),
        (["jax.nn:nothing"], "jax.nn has no 'nothing'"),
        (["no_such_module:f"], "No module named 'no_such_module'"),
        (["jax.nn:relu", "--only", "nothing"], "no case's name contains 'nothing'"),
        (["jax.nn:relu", "--with", "nothing"], "'nothing' must be name=value"),
    ],
)
def test_a_command_that_cannot_be_run_says_why(arguments, told, capsys):
    with pytest.raises(SystemExit, match="2"):
        conformance.main(arguments)
    assert told in capsys.readouterr().err


def test_the_table_on_the_site_is_that_of_the_results():
    run = json.loads((ROOT / "benchmarks/results/conformance.json").read_text())
    page = (ROOT / "docs/conformance.md").read_text()
    hint = "run `python -m benchmarks.run_conformance --into docs/conformance.md`"
    assert run_conformance.MARKED.search(page)[2] == run_conformance.table(run), hint
    assert {v["verdict"] for v in run["verdicts"]["flash_pallas"]} == {RIGHT}
    assert [v["case"] for v in run["verdicts"]["jax.nn"]] == list(BY_NAME)
