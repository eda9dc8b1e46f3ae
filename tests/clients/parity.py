"""The comparison of a library's own attention with flash_pallas in the same model.

The bound is 1e-6 of the loss, and of the norm of each gradient, in float32.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

BOUND = 1e-6
DOCS = Path(__file__).parent.parent.parent / "docs" / "switching.md"
RECORD: dict[str, Any] = {}
# What the versions of results are named for.
PACKAGES = {
    "equinox": ("equinox",),
    "gemma": ("gemma", "flax"),
    "keras": ("keras",),
    "levanter": ("marin-levanter", "marin-haliax", "equinox"),
    "maxtext": ("maxtext", "flax"),
    "transformers": ("transformers", "flax"),
}


def difference(found: Any, wanted: Any) -> float:
    """Returns the largest difference of two arrays, relative to the largest entry of `wanted`."""
    found, wanted = (np.asarray(x, np.float64) for x in (found, wanted))
    assert found.shape == wanted.shape and np.isfinite(found).all()
    largest = np.abs(wanted).max(initial=0.0)
    return float(np.abs(found - wanted).max(initial=0.0) / (largest or 1.0))


def distance(found: Any, wanted: Any) -> float:
    """Returns the norm of the difference of two arrays, relative to that of `wanted`."""
    found, wanted = (np.asarray(x, np.float64) for x in (found, wanted))
    assert found.shape == wanted.shape and np.isfinite(found).all()
    return float(np.linalg.norm(found - wanted) / (np.linalg.norm(wanted) or 1.0))


def compare(case: str, theirs: tuple[Any, Any], ours: tuple[Any, Any]) -> None:
    """Compares (loss, gradients) of both and notes the differences.

    A gradient smaller than a thousandth of the largest of its model is a rounding error of zero, as
    that of the keys' bias, which cancels in the softmax: it is measured against the largest.
    """
    (loss, wanted), (found_loss, found) = theirs, ours
    paths, arrays = jax.tree_util.tree_leaves_with_path(wanted), jax.tree.leaves(found)
    norms = [np.linalg.norm(np.asarray(x, np.float64)) for _, x in paths]
    assert len(paths) == len(arrays) and max(norms) > 0
    apart = {
        jax.tree_util.keystr(path): distance(y, x)
        * (1.0 if norm > 1e-3 * max(norms) else norm / max(norms))
        for (path, x), y, norm in zip(paths, arrays, norms, strict=True)
    }
    where = max(apart, key=apart.__getitem__)
    noted = {
        "loss": float(loss),
        "loss_difference": difference(found_loss, loss),
        "gradients": len(apart),
        "largest_gradient_difference": apart[where],
        "largest_of": where,
    }
    RECORD.setdefault("parity", {})[case] = noted
    assert noted["loss_difference"] <= BOUND and apart[where] <= BOUND, noted


def curves(name: str, theirs: list[float], ours: list[float]) -> None:
    """Compares losses of 50 steps and notes them; they must fall by a tenth at least.

    Fifty steps may be ten times as far apart as one: errors of rounding add up. The optimizer is
    SGD with momentum; Adam divides by the gradients' size and makes rounding errors of zero large.
    """
    assert len(theirs) == len(ours) == 50 and theirs[-1] < 0.9 * theirs[0]
    apart = max(abs(x - y) / abs(x) for x, y in zip(theirs, ours, strict=True))
    RECORD.setdefault("curves", {})[name] = {
        "theirs": theirs,
        "flash_pallas": ours,
        "largest_relative_difference": apart,
    }
    assert apart <= 10 * BOUND, apart


def calls(monkeypatch, module: Any, name: str = "flash_attention") -> list[dict[str, Any]]:
    """Returns a list that gets the keywords of each call which an integration makes."""
    found, function = [], getattr(module, name)

    def noted(*arrays, **options):
        found.append(options)
        return function(*arrays, **options)

    monkeypatch.setattr(module, name, noted)
    return found


def run_the_page(client: str) -> None:
    """Runs the code of docs/switching.md that is marked as a library's; it prints what it says."""
    pattern = rf"^<!-- client: {client} -->\n\n```python\n(.*?)^```\n\n```text\n(.*?)^```\n"
    text = DOCS.read_text()
    blocks = re.findall(pattern, text, re.MULTILINE | re.DOTALL)
    assert len(blocks) == text.count(f"<!-- client: {client} -->") > 0
    for code, wanted in blocks:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(code, {"__name__": "page"})
        # Libraries print too: what the page says must be the end.
        assert printed.getvalue().endswith(wanted)


def normal(seed: int, *shape: int) -> Any:
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32)


def write(path: Path, client: str) -> None:
    """Adds the session's results under the client's name to a JSON file."""
    results = json.loads(path.read_text()) if path.exists() else {}
    kept = {k: v for k, v in results.get(client, {}).items() if k == "install_seconds"}
    found = {name: importlib.metadata.version(name) for name in ("jax", *PACKAGES[client])}
    results[client] = {"versions": found, "device": jax.devices()[0].device_kind, **kept, **RECORD}
    path.write_text(json.dumps(dict(sorted(results.items())), indent=1) + "\n")
