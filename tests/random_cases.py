"""Random cases with values: any combination of features, and numbers that programs really pass."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import jax.numpy as jnp

from .cases import ATTRACTING, HIDING, SEED_KINDS, Case
from .mods import MASK_MODS, SCORE_MODS

BLOCKS = ((64, 64), (64, 128), (128, 64), (128, 128), (192, 64))
POSITIONS = ("restart", "gaps", "random", "shifted")
INTEGERS = ("int32", "int32", "uint32", "int8", "uint8", "int16", "uint16")
WIDE_INTEGERS = (*INTEGERS, "int64", "int64", "uint64")
MAGNITUDES = (-30, -8, 3, 6, 9, 14)
HALF_MAGNITUDES = (-8, 3, 6)  # q and k fit float16


class Draws(Protocol):
    """Source of decisions: hypothesis, which shrinks failures, or a generator."""

    def one_of(self, values) -> Any:
        """Picks one of these values."""

    def chance(self, p: float) -> bool:
        """Returns True with probability p."""
        ...

    def between(self, low: int, high: int) -> int:
        """Draws an integer, both ends included."""
        ...


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Limits of the sizes that are drawn.

    Attributes:
        length: most queries and keys.
        batch, kv_heads, group: largest value of each.
        head_dims: head dims of q and k to choose from.
        v_head_dims: head dims of v; None is that of q and k.
        dtypes: dtypes of all arrays.
    """

    length: int = 300
    batch: int = 3
    kv_heads: int = 2
    group: int = 3
    head_dims: tuple[int, ...] = (1, 8, 24, 64)
    v_head_dims: tuple[int | None, ...] = (None, 8, 40)
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")


def random_case(draw: Draws, sizes: Sizes = Sizes()) -> Case:
    """Draws a case; most features are in a third of them, so most have several and few all."""
    batch, kv_heads = draw.between(1, sizes.batch), draw.between(1, sizes.kv_heads)
    q_len, kv_len = draw.between(1, sizes.length), draw.between(1, sizes.length)
    dtype = draw.one_of(sizes.dtypes)
    fields = _masks(draw, batch, q_len, kv_len)
    fields |= {
        "poison": draw.chance(0.5),
        "sinks": draw.chance(0.33),
        "max_logit": draw.chance(0.33),
        "deterministic": draw.chance(0.25),
        "x64": (x64 := draw.chance(0.33)),
        "integers": draw.one_of(WIDE_INTEGERS if x64 else INTEGERS),
        "empty_rows": draw.one_of(("zero", "zero", "mean")),
    }
    if draw.chance(0.33):
        fields |= {"dropout_rate": draw.one_of((0.1, 0.5)), "dropout_seed": draw.between(0, 3)}
        fields |= {"seed_kind": draw.one_of(sorted(SEED_KINDS))}
        fields |= {"broadcast_dropout": draw.chance(0.5)}
    fields |= _logits(draw, batch, dtype)
    return Case(
        "drawn",
        T=q_len,
        S=kv_len,
        B=batch,
        N=kv_heads * draw.between(1, sizes.group),
        K=kv_heads,
        H=draw.one_of(sizes.head_dims),
        Hv=draw.one_of(sizes.v_head_dims),
        dtype=dtype,
        **fields,
    )


def random_packed_case(draw: Draws, sizes: Sizes = Sizes()) -> Case:
    """Draws a case of sorted documents of one sequence, without what reads positions in them.

    `packed` makes it a call of flash_attention_varlen: there queries and keys have the same
    documents, in which distances between positions are those in the whole.
    """
    case = random_case(draw, dataclasses.replace(sizes, batch=1))
    hides = dict.fromkeys(("q_lengths", "kv_lengths", "mask_mod", "score_mod", "block_mask"))
    positions = {"q_positions": None, "kv_positions": None, "q_offset": 0}
    more = {"empty_rows": "zero", "max_logit": False, "alibi": case.alibi and "N"}
    return dataclasses.replace(
        case, S=case.T, segments="packed", poison=False, **hides, **positions, **more
    )


def packed(call):
    """Wraps flash_attention_varlen as (q, k, v, **arguments of a packed case) -> (o, lse)."""

    def run(q, k, v, *, q_segment_ids, kv_segment_ids, q_offset, **arguments):
        starts = jnp.searchsorted(q_segment_ids[0].astype(jnp.int32), jnp.arange(5))
        for name in {"bias", "mask"} & set(arguments):
            arguments[name] = arguments[name][0]
        given = {"cu_seqlens_q": starts.astype(jnp.int32), "return_lse": True}
        o, lse = call(q[0], k[0], v[0], **given, **arguments)
        return o[None], lse[None]

    return run


def _masks(draw: Draws, batch: int, q_len: int, kv_len: int) -> dict[str, Any]:
    """Draws fields that hide keys: a window of (0, 0) leaves 1, an offset before the keys none."""
    rarely = lambda make: make() if draw.chance(0.33) else None
    side = lambda: draw.one_of((None, 0, 0, draw.between(0, 100)))
    offset = lambda: draw.between(-q_len, kv_len)
    lengths = lambda longest: lambda: tuple(draw.between(0, longest) for _ in range(batch))
    offsets = (0, offset(), tuple(offset() for _ in range(batch)))
    found = {
        "causal": draw.chance(0.5),
        "window": rarely(lambda: (side(), side())),
        "q_offset": draw.one_of(offsets),
    }
    if draw.chance(0.25):
        found["q_positions"] = draw.one_of(POSITIONS)
        found["kv_positions"] = draw.one_of((None, *POSITIONS))
        found["q_offset"] = 0  # positions say it
    elif draw.chance(0.1):
        found["kv_positions"] = draw.one_of(POSITIONS)
    if found["window"] and draw.chance(0.4):
        each = draw.chance(0.5)  # a number of each batch entry's own
        numbers = lambda: tuple(draw.between(0, 100) for _ in range(batch))
        sides = (None if x is None else numbers() if each else x for x in found["window"])
        found |= {"window": None, "window_arrays": tuple(sides)}
    if draw.chance(0.25):
        counts = found["q_offset"] == 0 and not {"q_positions", "kv_positions"} & set(found)
        made_from = draw.one_of(
            ("dense", "indices", "mask_mod") if counts else ("dense", "indices")
        )
        axes = draw.one_of("B1") + draw.one_of("NK1")
        found["block_mask"] = made_from, axes, draw.one_of(BLOCKS)
    return found | {
        "mask": rarely(lambda: _pattern(draw)),
        "segments": rarely(lambda: draw.one_of(("packed", "unsorted", "padded"))),
        "q_lengths": rarely(lengths(q_len)),
        "kv_lengths": rarely(lengths(kv_len)),
        "mask_mod": rarely(lambda: draw.one_of(sorted(MASK_MODS))),
    }


def _logits(draw: Draws, batch: int, dtype: str) -> dict[str, Any]:
    """Draws fields that turn scores into logits; a third are huge, tiny or hidden by numbers."""
    rarely = lambda make: make() if draw.chance(0.33) else None
    kind = draw.one_of(("usual", "usual", "usual", "usual", "additive", "magnitude"))
    if kind == "additive":
        values = tuple(draw.one_of(HIDING + ATTRACTING) for _ in range(batch))
        where = draw.one_of(("left_padding", "no_key", "one_key"))
        return {"additive": (where, values)}
    if kind == "magnitude":
        sizes = HALF_MAGNITUDES if dtype == "float16" else MAGNITUDES
        return {"magnitude": draw.one_of(sizes)}
    return {
        "scale": rarely(lambda: draw.one_of((1.0, -0.3))),
        "bias": rarely(lambda: _pattern(draw) + draw.one_of(("", "", "-inf", "-rows", "-causal"))),
        "softcap": rarely(lambda: draw.one_of((1.0, 20.0))),
        "alibi": rarely(lambda: draw.one_of(("N", "BN"))),
        "score_mod": rarely(lambda: draw.one_of(sorted(SCORE_MODS))),
    }


def _pattern(draw: Draws) -> str:
    return "".join(draw.one_of((letter, "1")) for letter in "BNTS")
