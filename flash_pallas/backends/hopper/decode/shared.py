"""Decoding with shared prefixes: two launches of the decode kernel, and one that joins them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from ....core import shared_prefix
from ....core.decode import DecodeOperands, DecodeProblem, DecodeSpec, describe
from ....core.problem import Outputs
from .combine import SHARES as MOST_SHARES
from .combine import Places, join
from .kernel import launched
from .plan import DecodePlan
from .tiles import DecodeBlocks, takes_wide


def decode_shared(
    choose: Callable[[DecodeProblem], DecodeBlocks],
    spec: DecodeSpec,
    operands: DecodeOperands,
    interpret: bool,
) -> Outputs | None:
    """Computes a decode call whose shared prefixes are read once.

    There are tiles for every way to share, such as by pairs, and most of them have no sequences
    where many share one prefix. Their CTAs leave at once: with blocks that are guessed and results
    of zeros, 64 sequences with one prefix took 213 us, of which 180 were for nothing.

    Args:
        choose: chooses blocks, where `takes` says so.
        spec: static parameters, with `shares_prefix`.
        operands: as in core.shared_prefix.attend.
        interpret: run by the interpreter.

    Returns:
        Outputs as of `decode`; None: the shares are more than one launch joins.
    """
    calls = shared_prefix.divided(spec, operands)
    few = dataclasses.replace(describe(calls.prefix, calls.spec), batch=calls.few)
    blocks = choose(few)
    of_tiles = dataclasses.replace(few, batch=len(calls.prefix.q))
    prefix = DecodePlan(of_tiles, blocks, interpret, joined=True, skips=True)
    rest = describe(calls.rest, calls.spec)
    own = DecodePlan(rest, choose(rest), interpret, joined=True)
    if (fitted := joinable(own, prefix)) is None:
        return None
    prefix = fitted
    shared = launched(prefix, calls.prefix)
    places = Places(calls.sharing.tile, calls.sharing.slot)
    return join((own, prefix), launched(own, calls.rest), shared, places, operands.sinks)


def joinable(own: DecodePlan, prefix: DecodePlan) -> DecodePlan | None:
    """Returns the plan of the prefixes with as many splits as one launch joins.

    None: they would be less than half as many.
    """
    wanted, most = prefix.blocks.num_splits, MOST_SHARES - own.blocks.num_splits
    if 2 * most < wanted:
        return None
    blocks = dataclasses.replace(prefix.blocks, num_splits=min(wanted, most))
    return dataclasses.replace(prefix, blocks=blocks)


def takes(problem: DecodeProblem) -> bool:
    """Says whether `decode_shared` may take a problem: with head dims that one warpgroup holds."""
    return not takes_wide(problem)
