"""Extension of griffe that makes Markdown of the package's docstrings.

Shapes such as [*B, T, N, H] become code, other asterisks stay what they are, and the code of a
section "Example" becomes a block.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import griffe

CODE = re.compile(r"(`[^`]*`)")
SHAPE = re.compile(r"\[[*#]*[A-Z]\w*(?:, [*#\w +-]+)*\](?!\()")


def as_markdown(text: str) -> str:
    """Returns a docstring of Google's style as griffe and Markdown should read it."""
    code = (">>>", "...")
    lines = text.split("\n")
    return "\n".join(x if x.lstrip().startswith(code) else _line(x) for x in lines)


def _line(line: str) -> str:
    if re.fullmatch(r"\s*Example:", line):
        return line.replace("Example:", "Examples:")
    # **options: at the beginning of a line names a parameter.
    name, rest = re.fullmatch(r"(\s*\*+\w+:)?(.*)", line).groups(default="")
    shapes = "".join(_each(rest, lambda text: SHAPE.sub(r"`\g<0>`", text)))
    return name + "".join(_each(shapes, lambda text: text.replace("*", r"\*")))


def _each(line: str, change: Callable[[str], str]) -> Iterator[str]:
    """Yields the parts of a line, those outside backticks changed."""
    for i, part in enumerate(CODE.split(line)):
        yield part if i % 2 else change(part)


class Docstrings(griffe.Extension):
    """Rewrites every docstring as it is loaded."""

    def on_instance(self, *, obj: griffe.Object, **_) -> None:
        """Rewrites the docstring of an object of the package, if it has one."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
