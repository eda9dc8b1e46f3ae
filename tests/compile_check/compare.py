"""Compares the instruction counts of kernels that two versions share.

    python -m tests.compile_check --json before.json      # at the earlier commit
    python -m tests.compile_check --json after.json
    python -m tests.compile_check.compare before.json after.json --out changes.json

Both need nvdisasm. With --identical it exits with 1 unless both have the same kernels with the same
machine code, which a change of names or files must leave as it was; or with the same PTX, where
line numbers alone have moved ptxas' schedule. Counts are static: instructions in the kernel, not
executed ones.
"""

from __future__ import annotations

import argparse
import collections
import json
import sys
from pathlib import Path
from typing import Any

KEY = ("kernel", "path", "head_dim", "dtype", "mask")


def changes(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns one record for each kernel in both lists: totals, and opcodes whose count changed.

    Raises:
        ValueError: a record has no instruction counts, or the lists share no kernel.
    """
    identity = lambda record: tuple(record[name] for name in KEY)
    counts = lambda record: _counts(record, identity(record))
    earlier = {identity(record): record for record in before}
    shared = [(earlier[identity(r)], r) for r in after if identity(r) in earlier]
    if not shared:
        raise ValueError("the two reports share no kernel")
    return [
        dict(zip(KEY, identity(new), strict=True))
        | {
            "before": sum(counts(old).values()),
            "after": sum(counts(new).values()),
            "changed": _changed(counts(old), counts(new)),
        }
        for old, new in shared
    ]


def differences(
    before: list[dict[str, Any]], after: list[dict[str, Any]], digest: str = "code"
) -> list[str]:
    """Returns the kernels whose digest differs or that only one of the lists has.

    Args:
        before, after: records of two reports.
        digest: "code" of the machine code, "ptx" of what ptxas was given.

    Raises:
        ValueError: a record has no such digest.
    """
    old, new = _digests(before, digest), _digests(after, digest)
    names = sorted(old.keys() | new.keys(), key=str)
    return [" ".join(map(str, name)) for name in names if old.get(name) != new.get(name)]


def _digests(records: list[dict[str, Any]], digest: str) -> dict[tuple, list[str]]:
    found = collections.defaultdict(list)
    for record in records:
        name = tuple(record[key] for key in KEY)
        if not record.get(digest):
            raise ValueError(f"{name} has no digest of its {digest}: were nvdisasm and PTX there?")
        found[name].append(record[digest])
    return {name: sorted(each) for name, each in found.items()}  # XLA may reorder equal kernels


def _tell_differences(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> int:
    """Prints the kernels that differ; returns 1 if one of them does in its PTX."""
    code, ptx = differences(before, after), differences(before, after, "ptx")
    for name in code:
        print(name, "" if name in ptx else "(the same PTX: line numbers moved ptxas' schedule)")
    print(f"{len(after)} kernels, {len(code)} differ, {len(ptx)} of them in PTX")
    return 1 if ptx else 0


def _counts(record: dict[str, Any], name: tuple) -> dict[str, int]:
    if not record["instructions"]:
        raise ValueError(f"{name} has no instruction counts: nvdisasm was not found")
    return record["instructions"]


def _changed(old: dict[str, int], new: dict[str, int]) -> dict[str, list[int]]:
    names = sorted(old.keys() | new.keys())
    pairs = {name: [old.get(name, 0), new.get(name, 0)] for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def main() -> int:
    """Runs the command line: prints the table and writes the records; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.compile_check.compare")
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--out", type=Path, help="write the records to this file")
    parser.add_argument("--identical", action="store_true", help="compare machine code instead")
    arguments = parser.parse_args()
    old, new = (json.loads(path.read_text()) for path in (arguments.before, arguments.after))
    if arguments.identical:
        return _tell_differences(old["kernels"], new["kernels"])
    records = changes(old["kernels"], new["kernels"])
    for r in records:
        name = " ".join(str(r[key]) for key in KEY)
        share = f"{100 * (r['after'] / r['before'] - 1):+.1f} %"
        print(f"{name:<75} {r['before']:>6} {r['after']:>6} {share:>8}  {r['changed'] or 'same'}")
    if arguments.out:
        about = {"ptxas": [old["ptxas"], new["ptxas"]], "kernels": records}
        arguments.out.write_text(json.dumps(about, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
