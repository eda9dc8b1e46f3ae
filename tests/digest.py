"""The seed of what runs in parts: `python -m tests.digest` prints it.

It is a digest of the package and of its tests, so that a run before a commit, one in CI and one
from a source distribution choose the same cases, and the next change chooses others. It needs
nothing but the standard library.
"""

from __future__ import annotations

import functools
import hashlib
import os
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = ("flash_pallas", "tests")
SUFFIXES = (".py", ".json")  # neither caches nor what an editor leaves


def of_files(root: Path) -> int:
    """Returns 31 bits of a digest of the names and contents of the files in FOLDERS."""
    names = (path.relative_to(root) for folder in FOLDERS for path in (root / folder).rglob("*"))
    found = hashlib.sha256()
    for name in sorted(n.as_posix() for n in names if n.suffix in SUFFIXES):
        content = (root / name).read_bytes()
        found.update(f"{name} {len(content)}\n".encode() + content)
    return int.from_bytes(found.digest()[:4], "big") >> 1


@functools.cache
def seed() -> int:
    """Returns FLASH_PALLAS_SEED where it is set, else the digest of this checkout."""
    return int(os.environ.get("FLASH_PALLAS_SEED") or of_files(ROOT))


if __name__ == "__main__":
    sys.stdout.write(f"{seed()}\n")
