"""The results file: its contents, where they come from, and how it is read back."""

from __future__ import annotations

import csv
import datetime
import importlib.metadata
import json
import math
import os
import pathlib
import subprocess
from collections.abc import Callable
from typing import Any

import jax

from .timing import torch_or_none

SCHEMA = 1

# Every row of a timing suite has these; the last six are None where `refused` is not.
ROW_FIELDS = (
    "batch", "q_len", "q_heads", "kv_heads", "head_dim", "causal", "direction", "provider",
    "refused", "ms", "spread", "tflops", "ratio_to_torch_cudnn", "launches", "gate",
)  # fmt: skip
# Not in every committed file: speed as a share of that of a large product of matrices in the same
# rounds and the clock of the SMs meanwhile, None without a GPU; speed relative to every
# other provider, by name.
LATER_FIELDS = ("share_of_gemm", "mhz", "relative")
# Suites whose rows have fields of their own.
OWN_ROWS = (
    "memory",
    "features",
    "decode",
    "overhead",
    "parallel",
    "client",
    "derivatives",
    "mean_flow",
    "stack",
    "training",
    "sharded_training",
    "serving",
    "engine",
    "first_call",
)
HEADER_FIELDS = ("schema", "suite", "date", "commit", "device", "driver", "versions", "method")


def header(suite: str, method: dict[str, Any]) -> dict[str, Any]:
    """Returns everything about a run apart from its rows."""
    return {
        "schema": SCHEMA,
        "suite": suite,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit(),
        "device": jax.local_devices()[0].device_kind,
        "driver": _command("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "versions": versions(),
        "method": method,
    }


def commit() -> str | None:
    """Returns FLASH_PALLAS_COMMIT where it is set (a copy without .git), else git's commit.

    Git's commit ends in "-dirty" where tracked files other than results have changed.
    """
    named = os.environ.get("FLASH_PALLAS_COMMIT")
    if named:
        return named
    folder = str(pathlib.Path(__file__).parent)
    found = _command("git", "-C", folder, "rev-parse", "HEAD")
    # Results are written on the way, so they do not count as a change.
    status = ("status", "--porcelain", "--untracked-files=no", "--", ":/", ":(exclude)results")
    dirty = found and _command("git", "-C", folder, *status)
    return f"{found}-dirty" if dirty else found


def versions() -> dict[str, str]:
    """Returns the versions of all packages that decide a number, where they are installed."""
    packages = ("jax", "jaxlib", "torch", "triton", "jax-triton", "tokamax", "nvidia-cudnn-cu13")
    found = {}
    peers = ("flash-attn-4", "dew-flash-attn-cu12", "dew-flash-attn-cu13")
    for package in (*packages, *peers):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    torch = torch_or_none()
    if torch is not None:
        found["cudnn (torch)"] = str(torch.backends.cudnn.version())
        found["cuda (torch)"] = str(torch.version.cuda)
    return found


def _command(*words: str) -> str | None:
    try:
        run = subprocess.run(words, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return run.stdout.strip().splitlines()[0] if run.stdout.strip() else None


def check(results: dict[str, Any]) -> None:
    """Raises ValueError where a results file is not as this module describes it."""
    missing = [name for name in (*HEADER_FIELDS, "rows") if name not in results]
    if missing:
        raise ValueError(f"results lack {missing}")
    if results["schema"] != SCHEMA:
        raise ValueError(f"schema {results['schema']}, expected {SCHEMA}")
    if results["suite"] in OWN_ROWS:
        return
    for row in results["rows"]:
        if set(row) - set(LATER_FIELDS) != set(ROW_FIELDS):
            raise ValueError(f"row fields differ: {sorted(set(row) ^ set(ROW_FIELDS))}")
        if (row["refused"] is None) != (row["ms"] is not None):
            raise ValueError(f"a row has a time or a reason for having none: {row}")
        if row["ms"] is not None and not (row["gate"] and row["gate"]["ok"]):
            raise ValueError(f"a row has a time without having passed the gate: {row}")


def save(path: pathlib.Path, results: dict[str, Any]) -> None:
    """Writes the file in one step, and a CSV file of its rows next to it."""
    check(results)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps(_finite(results), indent=1, allow_nan=False) + "\n")
    draft.replace(path)
    nested = ("gate", "relative")
    rows = [{k: v for k, v in row.items() if k not in nested} for row in results["rows"]]
    if rows:
        with path.with_suffix(".csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, list(dict.fromkeys(name for row in rows for name in row)))
            writer.writeheader()
            writer.writerows(rows)


def with_earlier(path: pathlib.Path, found: dict[str, Any], about: Callable) -> dict[str, Any]:
    """Returns `found` with the file's rows about something else first, each with its own commit.

    Args:
        path: the file, if there is one.
        found: results of this run.
        about: function of a row; says what that is about.

    Raises:
        ValueError: the file's rows were taken on another kind of device.
    """
    if not path.exists():
        return found
    old = load(path)
    if old["device"] != found["device"]:
        raise ValueError(f"{path} is of {old['device']}, not {found['device']}: name another file")
    replaced = {about(row) for row in found["rows"]}
    kept = [{"commit": old["commit"]} | row for row in old["rows"] if about(row) not in replaced]
    return found | {"rows": kept + found["rows"]}


def _finite(value):
    """Replaces NaN and infinity by None, as JSON has neither."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def load(path: pathlib.Path) -> dict[str, Any]:
    """Reads and checks a results file.

    Raises:
        ValueError: the file is not one.
    """
    results = json.loads(path.read_text())
    check(results)
    return results
