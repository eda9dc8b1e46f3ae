"""Errors in the words of the caller: with the arguments of the function that was called."""

from __future__ import annotations

import contextlib
import os
import re
import traceback
from pathlib import Path

import jax

PACKAGE = str(Path(__file__).parent.parent) + os.sep
# Whose frames may lie between those of this package: JAX, which traces, and decorators.
CARRIERS = (str(Path(jax.__file__).parent) + os.sep, contextlib.__file__)
# Names that are also English words. They are arguments only where AN_ARGUMENT follows.
PROSE = frozenset({"bias", "causal", "deterministic", "mask", "scale", "window"})
AN_ARGUMENT = r"(?=[\[=.:,;)]| is\b| has\b| must\b| and\b| contains\b| [({'\d])"
# Values as messages show them: strings in quotes, functions and other objects in angle brackets.
VALUES = r"""(?<!\w)(?:'[^']*'|"[^"]*")(?!\w)|<[A-Za-z][^<>]*>"""
LONG_NAMES = {"q": "query", "k": "key", "v": "value"}  # of most libraries


class Words(contextlib.ContextDecorator):
    """Context, or decorator, in which errors of this package name the caller's own arguments.

    Errors of JAX and of the user's own functions stay as they are, and so do values: a layout that
    is called 'q' is not the argument of that name.

    Attributes:
        names: by the name that an error has, what the caller calls it.
    """

    def __init__(self, names: dict[str, str]):
        self.names = names
        longest_first = sorted(names, key=len, reverse=True)
        patterns = (
            re.escape(x) + (AN_ARGUMENT if x in PROSE else r"(?!\w)") for x in longest_first
        )
        self._pattern = re.compile(rf"(?<![\w.])(?:{'|'.join(patterns)})|{VALUES}")

    def __enter__(self) -> Words:
        return self

    def __exit__(self, kind, error, trace) -> None:
        is_message = isinstance(error, (TypeError, ValueError, NotImplementedError))
        if is_message and error.args and isinstance(error.args[0], str) and _is_ours(trace):
            error.args = (self.said(error.args[0]), *error.args[1:])

    def said(self, message: str) -> str:
        """Returns the message with the caller's names."""
        return self._pattern.sub(lambda match: self.names.get(match[0], match[0]), message)


def _is_ours(trace) -> bool:
    """Returns True for an error that this package raised, not called by functions of the user.

    A layer's own attention, or a mod, that calls a public function knows that one's arguments.
    """
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(trace)]
    return files[-1].startswith(PACKAGE) and all(x.startswith((PACKAGE, *CARRIERS)) for x in files)
