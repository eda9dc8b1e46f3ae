"""Errors in the words of the function that was called, where it computes by another one."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

PACKAGE = str(Path(__file__).parent.parent) + os.sep
# Names that are words of prose too. They are arguments where this follows.
PROSE = frozenset({"bias", "causal", "deterministic", "mask", "scale", "window"})
AN_ARGUMENT = r"(?=[\[=.:,;)]| is\b| has\b| must\b| and\b| contains\b| [({'\d])"
LONG_NAMES = {"q": "query", "k": "key", "v": "value"}  # of most libraries


class Words(contextlib.ContextDecorator):
    """Context, or decorator, in which errors of this package name the caller's own arguments.

    Errors of JAX and of the user's own functions stay as they are.

    Attributes:
        names: by the name that an error has, what the caller calls it.
    """

    def __init__(self, names: dict[str, str]):
        self.names = names
        longest_first = sorted(names, key=len, reverse=True)
        ways = (re.escape(x) + (AN_ARGUMENT if x in PROSE else r"(?!\w)") for x in longest_first)
        self._pattern = re.compile(r"(?<![\w.])(?:" + "|".join(ways) + ")")

    def __enter__(self) -> Words:
        return self

    def __exit__(self, kind, error, trace) -> None:
        is_message = isinstance(error, (TypeError, ValueError, NotImplementedError))
        if is_message and error.args and isinstance(error.args[0], str) and _is_ours(trace):
            error.args = (self.said(error.args[0]), *error.args[1:])

    def said(self, message: str) -> str:
        """Returns the message with the caller's names."""
        return self._pattern.sub(lambda found: self.names[found[0]], message)


def _is_ours(trace) -> bool:
    """Returns True for an error that a file of this package raised."""
    while trace.tb_next is not None:
        trace = trace.tb_next
    return trace.tb_frame.f_code.co_filename.startswith(PACKAGE)
