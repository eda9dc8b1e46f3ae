"""Draws who attends to whom, from the calls that the documentation shows.

A page has a marker above a block of Python:

    <!-- picture: KIND [entries=0,1] [heads=0,1] [without=NAME] -->

The block runs up to its first call of a `flash_attention` function. The picture shows what
`flash_pallas.reference` makes of the arguments of that call, so it cannot differ from the code.
KIND is `visible` (the mask), `blocks` (those of its block mask), `weights` (the softmax), `logits`
or `max_logit` (logits with the largest of every query marked). `without=NAME` draws the same call
without that argument first.
"""

from __future__ import annotations

import dataclasses
import html
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import flash_pallas
from flash_pallas.core import block_lists
from flash_pallas.reference import Modifiers

MARKER = re.compile(
    r"<!-- picture: (\w+)((?: \w+=[\w,]+)*) -->\n+```python\n(.*?)^```$", re.M | re.S
)
RECORDED = ("flash_attention", "flash_attention_with_lse", "flash_attention_with_max_logit")

CELL, GAP, LEFT, TOP, BETWEEN = 14, 2, 34, 44, 26


class _Recorded(Exception):
    """Ends a block of code at its first call of attention, with the arguments of that call."""

    def __init__(self, q, k, v, **arguments):
        super().__init__()
        self.q, self.k, self.v, self.arguments = q, k, v, arguments


def recorded(code: str) -> _Recorded:
    """Runs a block of code up to its first call of attention and returns what it was called with.

    Raises:
        ValueError: the block calls none of the functions in RECORDED.
    """

    def record(q, k, v, **arguments):
        raise _Recorded(q, k, v, **arguments)

    own = {name: getattr(flash_pallas, name) for name in RECORDED}
    try:
        for name in RECORDED:
            setattr(flash_pallas, name, record)
        with jax.disable_jit():  # a block mask may be made under jit, and is to be looked at
            exec(compile(code, "documentation", "exec"), {"__name__": "__main__"})
    except _Recorded as call:
        return call
    finally:
        for name, function in own.items():
            setattr(flash_pallas, name, function)
    raise ValueError(f"this block below a picture never calls attention:\n{code}")


@dataclasses.dataclass(frozen=True)
class Matrices:
    """Everything about a call that a picture can show, numpy [B, N, T, S] unless it says otherwise.

    Attributes:
        visible: which keys each query sees.
        logits: scores after bias, ALiBi, softcap and score_mod.
        weights: softmax of them, before dropout.
        kept: the dropout mask.
        sink: [B, N, T], the weight of the sink, or None.
        first: [B], position of the first query.
    """

    visible: np.ndarray
    logits: np.ndarray
    weights: np.ndarray
    kept: np.ndarray
    sink: np.ndarray | None
    first: np.ndarray


def matrices(call: _Recorded) -> Matrices:
    """Computes what a picture shows of one call, by the oracle."""
    given = {name: x for name, x in call.arguments.items() if x is not None}
    for name in ("backend", "blocks", "deterministic", "precision"):
        given.pop(name, None)
    m = Modifiers(**given)
    q, k = (jnp.asarray(x, jnp.float32) for x in (call.q, call.k))
    q, k = m.cleared_queries(q), m.cleared_keys(k)
    k = jnp.repeat(k, q.shape[2] // k.shape[2], axis=2)
    scale = 1.0 / math.sqrt(q.shape[-1]) if m.scale is None else m.scale
    scores = scale * jnp.einsum("btnh,bsnh->bnts", q, k, precision=jax.lax.Precision.HIGHEST)
    keep = m.visible(scores.shape)
    logits = m.logits(scores, keep)
    weights, _, _ = m.softmax(logits, keep)
    kept = m.kept(scores.shape) if m.dropout_rate else jnp.ones(scores.shape, bool)
    sink = None if m.sinks is None else np.asarray(1.0 - weights.sum(-1))
    first = np.broadcast_to(np.asarray(m.q_offset), scores.shape[:1])
    return Matrices(*map(np.asarray, (keep, logits, weights, kept)), sink, first)


def blocks(call: _Recorded) -> Matrices:
    """Returns the blocks of a call's block mask: half a weight for a partial one."""
    mask = call.arguments["block_mask"]
    states = np.asarray(block_lists.states_of(mask.lists, -(-mask.kv_len // mask.block[1])))
    states = np.broadcast_to(states, (len(call.q), call.q.shape[2], *states.shape[2:]))
    shares, first = states / block_lists.WHOLE, np.zeros(len(states), int)
    return Matrices(states != block_lists.EMPTY, shares, shares, states >= 0, None, first)


@dataclasses.dataclass(frozen=True)
class Panel:
    """One grid of a picture: queries from top to bottom, keys from left to right.

    Attributes:
        title: what stands above it.
        values: float [T, S]; what is drawn, 1 in full colour and -1 in full of the other colour.
        visible: bool [T, S].
        dropped: bool [T, S]: crossed out.
        marked: bool [T, S]: framed.
        sink: [T], drawn as one more column, or None.
        first: position of the first query.
        unit: what a row is, if not one query: "blocks of ".
    """

    title: str
    values: np.ndarray
    visible: np.ndarray
    dropped: np.ndarray
    marked: np.ndarray
    sink: np.ndarray | None
    first: int
    unit: str = ""

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels, labels included."""
        rows, columns = self.visible.shape
        return LEFT + (columns + (2 if self.sink is not None else 0)) * CELL, TOP + rows * CELL


def panels(kind: str, found: Matrices, places: list[tuple[int, int]], note: str) -> list[Panel]:
    """Returns a panel for each (entry, head) of a call.

    Raises:
        ValueError: there is no such kind of picture.
    """
    drawn = []
    entries, heads = (len(set(axis)) > 1 for axis in zip(*places, strict=True))
    for b, n in places:
        visible = found.visible[b, n]
        nothing = np.zeros_like(visible)
        values, dropped, marked, sink = visible.astype(float), nothing, nothing, None
        if kind == "blocks":
            values = found.weights[b, n]
        elif kind == "weights":
            sink = None if found.sink is None else found.sink[b, n]
            most = max(found.weights[b, n].max(), 0 if sink is None else sink.max())
            # The square root keeps small weights apart from none.
            values = np.sqrt(found.weights[b, n] / most)
            sink = None if sink is None else np.sqrt(sink / most)
            dropped = visible & ~found.kept[b, n]
        elif kind in ("logits", "max_logit"):
            shown = np.where(visible, found.logits[b, n], 0.0)
            values = shown / 4.0
            if kind == "max_logit":
                largest = np.where(visible, shown, -np.inf).max(-1, keepdims=True)
                marked = visible & (shown == largest)
        elif kind != "visible":
            raise ValueError(f"no picture of {kind!r}")
        named = (note, f"entry {b}" if entries else "", f"head {n}" if heads else "")
        title = ", ".join(filter(None, named))
        unit = "blocks of " if kind == "blocks" else ""
        first = int(found.first[b])
        drawn.append(Panel(title, values, visible, dropped, marked, sink, first, unit))
    return drawn


def svg(drawn: list[Panel], label: str) -> str:
    """Returns the panels next to each other as one SVG, on one line."""
    width = sum(panel.size[0] for panel in drawn) + BETWEEN * (len(drawn) - 1)
    height = max(panel.size[1] for panel in drawn)
    parts, x = [], 0
    for panel in drawn:
        parts.append(f'<g transform="translate({x} 0)">{"".join(_grid(panel))}</g>')
        x += panel.size[0] + BETWEEN
    return (
        f'<svg viewBox="0 0 {width} {height}" style="width:{width}px" role="img" '
        f'aria-label="{html.escape(label)}">{"".join(parts)}</svg>'
    )


def _grid(panel: Panel):
    rows, columns = panel.visible.shape
    end = LEFT + columns * CELL
    yield f'<text class="title" x="{LEFT}" y="10">{html.escape(panel.title)}</text>'
    yield f'<text x="{LEFT}" y="25">{panel.unit}keys →</text>'
    yield from (
        f'<text class="mid" x="{LEFT + j * CELL + CELL // 2 - 1}" y="{TOP - 5}">{j}</text>'
        for j in range(0, columns, 4)
    )
    if panel.sink is not None:
        yield f'<text class="end" x="{end + 2 * CELL}" y="{TOP - 5}">sink</text>'
    for i in range(rows):
        y = TOP + i * CELL
        if i % 4 == 0:
            yield f'<text class="end" x="{LEFT - 6}" y="{y + 10}">{panel.first + i}</text>'
        for j in range(columns):
            yield from _cell(panel, i, j, LEFT + j * CELL, y)
        if panel.sink is not None:
            yield _square(end + CELL, y, "sink", panel.sink[i])
    middle = TOP + rows * CELL // 2
    turned = f"translate(9 {middle}) rotate(-90)"
    yield f'<text class="mid" transform="{turned}">← {panel.unit}queries</text>'


def _cell(panel: Panel, i: int, j: int, x: int, y: int):
    yield _square(x, y, "off" if not panel.visible[i, j] else "on", 0.0)
    value = float(panel.values[i, j])
    if panel.visible[i, j] and not panel.dropped[i, j]:
        yield _square(x, y, "low" if value < 0 else "high", abs(value))
    size = CELL - GAP
    if panel.dropped[i, j]:
        yield f'<path class="dropped" d="M{x + 3} {y + 3}l6 6m0 -6l-6 6"/>'
    if panel.marked[i, j]:
        yield f'<rect class="marked" x="{x}" y="{y}" width="{size}" height="{size}"/>'


def _square(x: int, y: int, kind: str, value: float) -> str:
    size = CELL - GAP
    shade = "" if kind in ("on", "off") else f' fill-opacity="{min(value, 1.0):.2f}"'
    return f'<rect class="{kind}" x="{x}" y="{y}" width="{size}" height="{size}"{shade}/>'


LEGENDS = {
    "visible": "Blue: the query sees the key.",
    "blocks": "Blue: whole blocks. Lighter: partial ones. What has no colour costs nothing.",
    "weights": "Darker: more weight. Without colour: hidden.",
    "logits": "Blue: positive. Orange: negative. Full colour: 4 or more.",
    "max_logit": "Blue: positive. Orange: negative. Framed: the largest of its query.",
}


def legend(kind: str, arguments: dict[str, Any]) -> str:
    """Returns the line below a picture."""
    dropped = kind == "weights" and arguments.get("dropout_rate")
    return LEGENDS[kind] + (" Crossed out: dropped." if dropped else "")


def picture(kind: str, code: str, options: dict[str, str]) -> str:
    """Returns the figure, as HTML on one line, that belongs to a block of code."""
    call = recorded(code)
    places = [
        (int(b), int(n))
        for b in options.get("entries", "0").split(",")
        for n in options.get("heads", "0").split(",")
    ]
    drawn, without = [], options.get("without")
    if without is not None:
        others = {name: x for name, x in call.arguments.items() if name != without}
        before = matrices(_Recorded(call.q, call.k, call.v, **others))
        drawn += panels(kind, before, places, f"without {without}")
    note = "" if without is None else f"with {without}"
    found = blocks(call) if kind == "blocks" else matrices(call)
    drawn += panels(kind, found, places, note)
    below = legend(kind, call.arguments)
    label = f"{kind.replace('_', ' ')} of the call below. {below}"
    return (
        f'<figure class="fp-picture">{svg(drawn, label)}<figcaption>{below}</figcaption></figure>'
    )


def replaced(markdown: str) -> str:
    """Returns the text of a page with its markers replaced by pictures."""

    def draw(found: re.Match) -> str:
        kind, words, code = found.groups()
        options = dict(word.split("=") for word in words.split())
        return f"{picture(kind, code, options)}\n\n```python\n{code}```"

    return MARKER.sub(draw, markdown)
