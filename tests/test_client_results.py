"""The figures of other libraries' models: within their bounds, of the versions that are named."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
RESULTS = json.loads((ROOT / "benchmarks" / "results" / "clients.json").read_text())
CLIENTS = sorted(x.stem for x in (ROOT / "flash_pallas" / "integrations").glob("[a-z]*.py"))


def row(client: str) -> str:
    """Returns the row of docs/numerics.md that a library's results make."""
    found = RESULTS[client]
    package = importlib.import_module(f"flash_pallas.integrations.{client}")._CLIENT.package
    cases = found["parity"].values()
    loss = max(case["loss_difference"] for case in cases)
    worst = max(case["largest_gradient_difference"] for case in cases)
    curves = [curve["largest_relative_difference"] for curve in found.get("curves", {}).values()]
    trained = f"{max(curves):.0e}" if curves else "-"
    version = re.sub(r"[.]dev\d+", "", found["versions"][package])
    return f"| {package} {version} | {len(cases)} | {loss:.0e} | {worst:.0e} | {trained} |"


def test_every_library_has_results():
    assert sorted(RESULTS) == CLIENTS
    assert sum("curves" in found for found in RESULTS.values()) >= 2


@pytest.mark.parametrize("client", CLIENTS)
def test_results_are_within_their_bounds(client):
    found = RESULTS[client]
    for case in found["parity"].values():
        assert case["loss_difference"] <= 1e-6 and case["largest_gradient_difference"] <= 1e-6
    for curve in found.get("curves", {}).values():
        pairs = list(zip(curve["theirs"], curve["flash_pallas"], strict=True))
        apart = max(abs(x - y) / abs(x) for x, y in pairs)
        assert len(pairs) == 50 and apart == curve["largest_relative_difference"] <= 1e-5


@pytest.mark.parametrize("client", CLIENTS)
def test_the_versions_are_those_of_the_tests(client):
    tested = importlib.import_module(f"flash_pallas.integrations.{client}")._CLIENT
    pins = (ROOT / ".ci" / "clients" / f"{client}.txt").read_text().splitlines()
    assert f"{tested.package}=={tested.tested}" in pins
    assert RESULTS[client]["versions"][tested.package] == tested.tested
    assert f"jax=={RESULTS[client]['versions']['jax']}" in pins


def test_the_page_has_the_results():
    text = (ROOT / "docs" / "numerics.md").read_text()
    assert [row(client) for client in CLIENTS] == re.findall(
        r"^\| \S+ [\d.]+ \| \d+ \| .*$", text, re.M
    )
