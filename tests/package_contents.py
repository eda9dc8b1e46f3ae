"""Checks what is in a wheel and in a source distribution.

    python -m tests.package_contents dist/*

It needs nothing but the standard library.
"""

from __future__ import annotations

import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCES = {str(path.relative_to(ROOT)) for path in ROOT.glob("flash_pallas/**/*.py")}
TABLES = {str(path.relative_to(ROOT)) for path in ROOT.glob("flash_pallas/tuned/*.json")}
IN_BOTH = SOURCES | TABLES | {"flash_pallas/py.typed"}
IN_SDIST = {"LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml", "hatch_build.py"}
IN_SDIST |= {"tests/test_doctor.py", "benchmarks/results/conformance.json"}  # tests can be run
LARGEST = {".whl": 1_000_000, ".gz": 3_000_000}  # bytes; 0.1.0 has 0.4 and 1.3 million


def names(archive: Path) -> set[str]:
    """Returns the files of an archive; of a source distribution without its outermost folder."""
    if archive.suffix == ".whl":
        return set(zipfile.ZipFile(archive).namelist())
    with tarfile.open(archive) as file:
        return {member.name.partition("/")[2] for member in file if member.isfile()}


def faults(archive: Path) -> Iterator[str]:
    """Yields what is missing in an archive, or should not be in it."""
    found = names(archive)
    wheel = archive.suffix == ".whl"
    wanted = IN_BOTH if wheel else IN_BOTH | IN_SDIST
    yield from (f"{archive.name} lacks {name}" for name in sorted(wanted - found))
    if wheel:
        licenses = [name for name in found if name.endswith(".dist-info/licenses/LICENSE")]
        if not licenses:
            yield f"{archive.name} lacks the license"
        inside = lambda name: name.partition("/")[0].startswith("flash_pallas")
        yield from (f"{archive.name} has {name}" for name in sorted(found) if not inside(name))
    kept = ("__pycache__", ".venv", ".egg-info/")
    yield from (f"{archive.name} has {n}" for n in sorted(found) if any(x in n for x in kept))
    size = archive.stat().st_size
    if size > LARGEST[archive.suffix]:
        yield f"{archive.name} has {size} bytes, more than {LARGEST[archive.suffix]}"


def main(archives: list[str]) -> int:
    """Prints the faults of a wheel and a source distribution; returns 1 if there is one."""
    suffixes = sorted(Path(name).suffix for name in archives)
    found = [fault for name in archives for fault in faults(Path(name))]
    if suffixes != [".gz", ".whl"]:
        found.append(f"expected one wheel and one source distribution, got {archives}")
    sys.stdout.write("\n".join([*found, f"{len(found)} faults in {len(archives)} archives", ""]))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
