"""The choice of cases for `make test`: all that are not thorough, and some of those that are.

A test is thorough by its mark: `@pytest.mark.thorough(always=["name of a case"])`. Of its cases run
those that the mark names, one in 32 of those that a mutation names, and one in 300 of the others.
Which ones goes by the seed of digest.py.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

from .mutation_list import SHARED_AND_HOPPER
from .portable_mutations import PORTABLE

PARTS = 300  # of the cases, of which one runs
NAMED_PARTS = 32  # likewise, of the cases that a mutation names
NAMED = frozenset(f"tests/{mutation.test}" for mutation in (*SHARED_AND_HOPPER, *PORTABLE))


def cases_of(nodeid: str, always: Iterable[str]) -> set[str]:
    """Returns the ids of the cases of the same function that its mark names."""
    function = nodeid.partition("[")[0]
    return {f"{function}[{case}]" for case in always}


def parts(nodeid: str) -> set[str]:
    """Returns what a name may be of which a case is one: itself, its function, its file."""
    function = nodeid.partition("[")[0]
    return {nodeid, function, function.partition("::")[0]}


def runs(nodeid: str, always: Iterable[str] | None, seed: int) -> bool:
    """Says whether `make test` runs a case.

    Args:
        nodeid: pytest's name of it.
        always: names that its mark has, None where it is not thorough.
        seed: what chooses one part of `PARTS`.
    """
    own = parts(nodeid)
    if always is None or own & cases_of(nodeid, always):
        return True
    parts_of_all = NAMED_PARTS if own & NAMED else PARTS
    return zlib.crc32(nodeid.encode()) % parts_of_all == seed % parts_of_all


def missing(names: Iterable[str], nodeids: Iterable[str]) -> list[str]:
    """Lists the names of which no case was found, though others of their files were."""
    found = {part for nodeid in nodeids for part in parts(nodeid)}
    return sorted(name for name in names if name.partition("::")[0] in found and name not in found)
