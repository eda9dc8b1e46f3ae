"""Decoding with shared prefixes: two launches of the decode kernel, and one that joins them."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ....core import shared_prefix
from ....core.decode import MAX_SPLITS, DecodeOperands, DecodeProblem, DecodeSpec, describe
from ....core.problem import Outputs
from .combine import SHARES as MOST_SHARES
from .combine import Places, join
from .kernel import launched
from .plan import DecodePlan, Packed
from .tiles import MIN_KEYS_PER_SPLIT, choose_decode, row_tiles, takes_wide


def decode_shared(
    spec: DecodeSpec,
    operands: DecodeOperands,
    num_sms: int,
    interpret: bool,
    packed: Packed | None = None,
) -> tuple[Outputs, Any] | None:
    """Computes a decode call whose shared prefixes are read once.

    There are tiles for every way to share, such as by pairs, and most of them have no sequences
    where many share one prefix. Their CTAs leave at once: with blocks that are guessed and results
    of zeros, 64 sequences with one prefix took 213 us, of which 150 were for nothing.

    Args:
        spec: static parameters, with `shares_prefix`, of a problem that `takes`.
        operands: as in core.shared_prefix.attend; q [tokens, N, H] where it is packed.
        num_sms: number of SMs.
        interpret: run by the interpreter.
        packed: where the queries are; None: they are not packed.

    Returns:
        (Outputs, counter or None) as of `decode_packed`; None: one launch cannot join the shares.
    """
    q, first = operands.q, None
    if packed is not None:
        first, count = packed.ends[:-1], jnp.diff(packed.ends)
        shape = len(operands.page_table), 1, *q.shape[1:]
        operands = operands._replace(
            q=jax.ShapeDtypeStruct(shape, q.dtype),
            kv_lengths=jnp.where(count == 1, operands.kv_lengths, 0),
        )
    calls = shared_prefix.divided(spec, operands, q, first)
    tiles = describe(calls.prefix, calls.spec)
    prefix = _of_tiles(tiles, dataclasses.replace(tiles, batch=calls.few), num_sms, interpret)
    rest = describe(calls.rest, calls.spec)
    own = DecodePlan(rest, choose_decode(rest, num_sms), interpret, joined=True)
    if (joinable := fewer_splits(own, prefix)) is None:
        return None
    shared = launched(joinable, calls.prefix)
    parts = launched(own, calls.rest._replace(q=q), packed)
    places = Places(calls.sharing.tile, calls.sharing.slot)
    outputs = join((own, joinable), parts, shared, places, operands.sinks, packed)
    return outputs, parts.counter


def takes(problem: DecodeProblem) -> bool:
    """Returns whether `decode_shared` may run: one warpgroup holds the head dims."""
    return not takes_wide(problem)


def _of_tiles(
    problem: DecodeProblem, few: DecodeProblem, num_sms: int, interpret: bool
) -> DecodePlan:
    """Returns the plan of the prefixes; `few` is the problem when all tiles are full.

    Keys of a prefix come from L2 for all tiles but one, and a CTA waits for them more than memory
    does for CTAs: there are as many splits as run at one time. H200, 4 full tiles of 8 KV heads, 8k
    keys: whole calls take 82 us with 2 splits, 70 with 4, 61 with 8, 76 with 16, which are two
    waves.
    """
    blocks = choose_decode(few, num_sms)
    if few.spec.num_splits is None:
        slots = num_sms * blocks.ctas_per_sm(few)
        splits = slots // (few.batch * few.kv_heads * row_tiles(few))
        most = min(MAX_SPLITS, few.kv_len // MIN_KEYS_PER_SPLIT)
        splits = max(min(splits, most), blocks.num_splits)
        blocks = dataclasses.replace(blocks, num_splits=splits)
    return DecodePlan(problem, blocks, interpret, joined=True, skips=True)


def fewer_splits(own: DecodePlan, prefix: DecodePlan) -> DecodePlan | None:
    """Returns the plan of the prefixes with as many splits as one launch joins.

    None: they would be less than half as many.
    """
    wanted, most = prefix.blocks.num_splits, MOST_SHARES - own.blocks.num_splits
    if 2 * most < wanted:
        return None
    blocks = dataclasses.replace(prefix.blocks, num_splits=min(wanted, most))
    return dataclasses.replace(prefix, blocks=blocks)
