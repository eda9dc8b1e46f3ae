"""The snippets of docs/porting.md: what they are, and the running of one."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np

PAGE = Path(__file__).parents[2] / "docs" / "porting.md"
FENCED = re.compile(r"^```(py|python|text)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Snippet:
    """One snippet: the call of another library, which makes `out`, and ours, which makes `o`.

    Attributes:
        library: the heading of its section.
        title: its own heading.
        line: of the page, on which `ours` begins.
        theirs: code.
        ours: code.
        printed: what `ours` prints.
    """

    library: str
    title: str
    line: int
    theirs: str
    ours: str
    printed: str

    def run(self) -> tuple[dict[str, Any], str]:
        """Runs ours; returns (its variables, what it printed)."""
        names: dict[str, Any] = {"__name__": "__main__"}
        with contextlib.redirect_stdout(io.StringIO()) as told:
            exec(compile("\n" * self.line + self.ours, PAGE.name, "exec"), names)
        return names, told.getvalue()

    def run_theirs(self, library: dict[str, Any], names: dict[str, Any]):
        """Runs theirs with what it calls and with the variables of ours; returns `out`."""
        names = {**names, **library}
        exec(compile(self.theirs, self.title, "exec"), names)
        return names["out"]


def snippets() -> list[Snippet]:
    """Returns all snippets of the page: third-level sections, each of three fenced blocks."""
    text, found = PAGE.read_text(), []
    for heading in re.finditer(r"^### (.*)\n", text, re.MULTILINE):
        library = re.findall(r"^## (.*)$", text[: heading.start()], re.MULTILINE)[-1]
        end = re.compile(r"^##", re.MULTILINE).search(text, heading.end())
        section = (heading.end(), end.start() if end else len(text))
        blocks = {match[1]: match for match in FENCED.finditer(text, *section)}
        assert list(blocks) == ["py", "python", "text"], heading[1]
        line = text[: blocks["python"].start(2)].count("\n")
        theirs, ours, printed = (blocks[x][2] for x in ("py", "python", "text"))
        found.append(Snippet(library, heading[1], line, theirs, ours, printed))
    return found


def arrays_of(names: dict[str, Any]) -> dict[str, np.ndarray]:
    """Returns the arrays among the variables of a snippet."""
    return {n: np.asarray(x) for n, x in names.items() if isinstance(x, jax.Array)}


def check_same(found, wanted) -> None:
    """Checks for equality in float32 of sums of at most 128 terms in two orders."""
    found, wanted = np.asarray(found), np.asarray(wanted)
    assert found.shape == wanted.shape
    np.testing.assert_allclose(found, wanted, rtol=0, atol=5e-6 * max(1, np.abs(wanted).max()))
