"""The site: code on its pages runs and prints what they say, pictures and tables are drawn."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

import flash_pallas
from benchmarks import figures
from flash_pallas import compat, devices, nn, parallel

from .test_readme import BLOCK

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
# tests/compat/test_porting.py runs its code, and that of other libraries in it.
PORTING = DOCS / "porting.md"
# Code for an environment with another library: tests/clients/test_<library>.py runs it.
CLIENT = re.compile(r"^<!-- client: (\w+) -->\n\n(?=```python)", re.MULTILINE)
OUTSIDE = re.compile(
    r"<(?:script|img|link|iframe)\b[^>]*(?:src|href)=[\"']?(?:https?:)?//|```mermaid"
)

# What takes seconds to compile; each page's first block runs in `make test` whatever it has.
COSTLY = re.compile(r"grad|mesh|append_kv|decode|nnx|linen|scan|vmap|_mod|dropout")
ALWAYS = "jax.distributed.initialize"  # no other test of `make test` has two processes


def blocks():
    """Yields (page, line, code, expected output) of each block of every page."""
    for page in (page for page in PAGES if page != PORTING):
        text, name = page.read_text(), str(page.relative_to(DOCS))
        for number, match in enumerate(BLOCK.finditer(text)):
            if any(mark.end() == match.start() for mark in CLIENT.finditer(text)):
                continue
            line = text[: match.start()].count("\n") + 1
            costly = number and COSTLY.search(match[1]) and ALWAYS not in match[1]
            marks = [pytest.mark.thorough] if costly else []
            yield pytest.param(name, line, *match.groups(), id=f"{name}:{line}", marks=marks)


@pytest.fixture
def script(monkeypatch):
    """Imports a module of docs/_scripts by its name."""
    monkeypatch.syspath_prepend(str(DOCS / "_scripts"))
    yield importlib.import_module
    for name in ("docstrings", "hooks", "performance", "pictures"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(("page", "line", "code", "printed"), list(blocks()))
def test_code_prints_what_the_page_says(page, line, code, printed, capsys):
    # Leading newlines make a traceback name the line of the page.
    exec(compile("\n" * line + code, page, "exec"), {"__name__": "__main__"})
    assert printed is not None, f"{page}:{line}: no text block says what is printed"
    assert capsys.readouterr().out == printed


def test_every_python_block_is_found():
    pages = [page.read_text() for page in PAGES if page != PORTING]
    marked = [name for text in pages for name in CLIENT.findall(text)]
    assert len(list(blocks())) == sum(text.count("```python") for text in pages) - len(marked) > 20
    # Each of them has a test, an environment, a module and its figures.
    assert set(marked) == {x.stem for x in (ROOT / "flash_pallas/integrations").glob("[a-z]*.py")}
    clients = {x.stem for x in (ROOT / ".ci/clients").glob("*.txt")} - {
        "torch"
    }  # of the compat tests
    assert set(marked) == clients
    tests = {x.stem: x.read_text() for x in (ROOT / "tests/clients").glob("test_*.py")}
    assert {f"test_{name}" for name in marked} == set(tests)
    assert all(f'run_the_page("{name}")' in tests[f"test_{name}"] for name in marked)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_every_page_is_in_the_navigation_and_loads_nothing_from_outside(page):
    assert re.search(rf"[: ]{page.relative_to(DOCS)}$", (ROOT / "mkdocs.yml").read_text(), re.M)
    assert not OUTSIDE.search(page.read_text())


def test_the_reference_has_every_public_name():
    text = "".join(x.read_text() for x in (DOCS / "api.md", *(DOCS / "api").glob("*.md")))
    # The module has the name of a function in it.
    text = text.replace("nn.attention_fn.", "nn.")
    told = set(re.findall(r"^::: (flash_pallas[\w.]*)$", text, re.MULTILINE))
    public = {f"flash_pallas.{name}" for name in flash_pallas.__all__}
    public |= {f"flash_pallas.nn.{name}" for name in nn.__all__}
    public |= {f"flash_pallas.parallel.{name}" for name in parallel.__all__}
    for module in (
        compat.flash_attn,
        compat.flex,
        compat.ragged_paged_attention,
        compat.splash,
        compat.torch_sdpa,
    ):
        own = {n: x for n, x in vars(module).items() if n[0] != "_" and callable(x)}
        public |= {f"{x.__module__}.{n}" for n, x in own.items() if x.__module__ == module.__name__}
    # Two names of one function each.
    aliases = {f"flash_pallas.compat.splash.make_splash_{x}_single_device" for x in ("mha", "mqa")}
    assert public - aliases <= told


@pytest.mark.thorough(always=["performance.md"])
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_markers_give_way_to_pictures_and_tables(page, script):
    text = page.read_text()
    drawn = script("hooks").on_page_markdown(text)
    assert "<!-- picture:" not in drawn and "<!-- results:" not in drawn
    assert drawn.count("<svg") == text.count("<!-- picture:")
    assert drawn.count("| --- |") - text.count("| --- |") >= text.count("<!-- results:")
    assert drawn.count("```python") == text.count("```python")


def test_a_picture_shows_the_call_in_its_code(script):
    pictures = script("pictures")
    code = (
        "import jax.numpy as jnp\n"
        "from flash_pallas import flash_attention\n"
        "x = jnp.ones((1, 4, 1, 8))\n"
        "flash_attention(x, x, x, causal=True, window=(1, 0), sinks=jnp.zeros(1))\n"
        "raise AssertionError\n"
    )
    found = pictures.matrices(pictures.recorded(code))
    band = np.tril(np.ones((4, 4), bool)) & ~np.tril(np.ones((4, 4), bool), -2)
    np.testing.assert_array_equal(found.visible[0, 0], band)
    np.testing.assert_allclose(found.sink[0, 0, 0], 1 / (1 + np.exp(np.sqrt(8))), rtol=1e-6)
    drawn = pictures.picture("visible", code, {})
    assert drawn.count('class="high"') == band.sum() and drawn.count('class="off"') == 9
    assert "flash_attention(" in code and flash_pallas.flash_attention.__name__ == "flash_attention"


def test_a_picture_of_blocks_shows_those_of_a_mask_made_under_jit(script):
    code = (
        "import jax, jax.numpy as jnp\n"
        "from flash_pallas import BlockMask, flash_attention\n"
        "def call(x, width):\n"
        "    seen = lambda b, n, i, j: (j <= i) & (j < width[n])\n"
        "    mask = BlockMask.from_mask_mod(seen, 1, 2, 192, 192, block=(64, 64))\n"
        "    return flash_attention(x, x, x, block_mask=mask)\n"
        "jax.jit(call)(jnp.ones((1, 192, 2, 8)), jnp.array([192, 64]))\n"
    )
    drawn = script("pictures").picture("blocks", code, {"heads": "0,1"})
    shades = re.findall('class="high"[^>]*fill-opacity="([^"]*)"', drawn)
    causal, first = ["0.50", "1.00", "0.50", "1.00", "1.00", "0.50"], ["0.50", "1.00", "1.00"]
    assert shades == causal + first and drawn.count("blocks of keys") == 2


def test_a_picture_above_other_code_is_refused(script):
    with pytest.raises(ValueError, match="never calls attention"):
        script("pictures").picture("visible", "1 + 1\n", {})
    with pytest.raises(ValueError, match="is written"):
        script("hooks").on_page_markdown("<!-- picture: visible -->\n\ntext\n")


def test_the_tables_of_performance_are_those_of_the_other_page(script):
    performance = script("performance")
    head, rule, *rows = performance.table("h200")
    columns = ["call", "ours", "cuDNN (PyTorch)", "cuDNN (jax.nn)", "Tokamax"]
    assert head.split(" | ")[1:] == [*columns[:-1], f"{columns[-1]} |"]
    assert set(rule) == set("| -") and len(rows) == 24
    measured = json.loads((ROOT / "benchmarks/results/h200.json").read_text())["rows"][0]
    told = f"{measured['tflops']:.0f} ({measured['ratio_to_torch_cudnn']:.2f})"
    assert measured["provider"] == "flash_pallas" and rows[0].split(" | ")[2] == told
    shape = "1,8192,16,16,128"
    head, _, first, second = performance.table("modifiers", shape)
    assert first.startswith("| 1,8192,<wbr>16,<wbr>16,<wbr>128 | causal | 0.")
    assert head.endswith("| call | forward | backward |") and "| causal, window 1024 |" in second
    assert any("| cuDNN (jax.nn), T=1 |" in x for x in performance.table("decode", "lengths"))
    with pytest.raises(ValueError, match="no row of 1,2,3"):
        performance.table("modifiers", f"{shape}; 1,2,3")
    drawn = performance.replaced("    <!-- results: h100 -->\n").splitlines()
    assert len(drawn) == 26 and all(x.startswith("    | ") for x in drawn)


@pytest.mark.parametrize("name", ["h100", "h200"])
def test_the_speed_of_a_known_gpu_is_that_of_the_results(name):
    assert str(devices.DEVICES[name].tflops) == figures.figures()[f"speed.{name}"]


def test_the_header_links_to_the_code_once_its_address_is_known(script, monkeypatch, tmp_path):
    hooks = script("hooks")
    told = hooks.on_config({})["repo_url"]
    assert told is None or told.startswith("https://")
    (tmp_path / "hatch_build.py").write_text('REPOSITORY = "https://example.org/code"\n')
    monkeypatch.setattr(hooks, "HERE", tmp_path / "docs" / "_scripts")
    assert hooks.on_config({})["repo_url"] == "https://example.org/code"


def test_docstrings_become_markdown(script):
    docstrings = script("docstrings")
    text = "x [*B, T]: a * b.\n    **options: `c * d`.\n\nExample:\n    >>> 2 * 3"
    assert docstrings.as_markdown(text) == (
        "x `[*B, T]`: a \\* b.\n    **options: `c * d`.\n\nExamples:\n    >>> 2 * 3"
    )
