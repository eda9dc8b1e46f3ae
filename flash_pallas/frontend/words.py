"""Texts for the caller: errors with the arguments of the function that was called, and caches."""

from __future__ import annotations

import contextlib
import os
import re
import traceback
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .arguments import is_known, known

PACKAGE = str(Path(__file__).parent.parent) + os.sep
# What calls on behalf of this package: JAX, which traces, and decorators.
CARRIERS = (str(Path(jax.__file__).parent) + os.sep, contextlib.__file__)
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
    """Returns True for an error that this package raised, not called by functions of the user.

    A layer's own attention, or a mod, that calls a public function knows that one's arguments.
    """
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(trace)]
    return files[-1].startswith(PACKAGE) and all(x.startswith((PACKAGE, *CARRIERS)) for x in files)


# Arrays of so many numbers at most are shown by their values.
SHOWN = 16


def readable(cache: Any) -> str:
    """Returns a cache as text: arrays by dtype and shape, lengths by their values."""
    fields = (f"{name}={_shown(x)}" for name, x in zip(cache._fields, cache, strict=True))
    return f"{type(cache).__name__}({', '.join(fields)})"


def _shown(x) -> str:
    if not hasattr(x, "dtype") or not hasattr(x, "shape"):
        return repr(x)
    there = isinstance(x, (np.ndarray, jax.Array)) and is_known(x)
    if there and x.ndim == 1 and x.size <= SHOWN:
        return str(known(x).tolist())
    return f"{jnp.dtype(x.dtype).name}{list(x.shape)}"
