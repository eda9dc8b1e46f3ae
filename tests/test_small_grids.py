"""Choices of the Hopper backend where SMs outnumber tiles."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from flash_pallas.backends.hopper import HopperBackend
from flash_pallas.core.mask import Mask
from flash_pallas.core.problem import AttentionSpec, Operands, describe

BACKEND = HopperBackend(num_sms=132)


def chosen(batch, q_len, kv_len, heads, head_dim, blocks=None, **spec):
    """Returns the tiles of a call; heads are (query heads, KV heads)."""
    shape = lambda length, n: jax.ShapeDtypeStruct((batch, length, n, head_dim), jnp.bfloat16)
    q, kv = shape(q_len, heads[0]), shape(kv_len, heads[1])
    problem = describe(Operands(q, kv, kv), AttentionSpec(scale=1.0, **spec))
    return BACKEND.attention.plan(problem, blocks)


CAUSAL = {"mask": Mask.causal()}


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("spec", [{}, CAUSAL], ids=["full", "causal"])
def test_parts_keep_multiprocessors_busy(head_dim, spec):
    parts = lambda batch, length, heads=(32, 8): (
        chosen(batch, length, length, heads, head_dim, **spec).backward.split_q
    )
    assert parts(1, 512) == 4  # 32 CTAs
    assert parts(2, 512) == 2  # 64
    assert parts(4, 512) == 1  # 128
    assert parts(4, 4096) == 1


def test_causal_walks_are_cut_though_multiprocessors_are_busy():
    """Checks 128 CTAs, one per SM, whose longest walk is 16 times the shortest."""
    parts = lambda batch, length, **spec: (
        chosen(batch, length, length, (32, 8), 128, **spec).backward.split_q
    )
    assert parts(1, 2048) == 1
    assert parts(1, 2048, **CAUSAL) == parts(2, 1024, **CAUSAL) == 2
    assert parts(1, 1024) == 2
    assert parts(1, 1024, **CAUSAL) == 3  # of four, each would have 1024 queries


@pytest.mark.parametrize("heads", [(16, 16), (8, 8)])
@pytest.mark.parametrize("length", [512, 1024, 2048])
def test_heads_without_groups_are_not_cut(heads, length):
    assert chosen(1, length, length, heads, 128, **CAUSAL).backward.split_q == 1


def test_short_walks_are_not_cut():
    parts = lambda length, heads, **spec: (
        chosen(1, length, length, heads, 128, **spec).backward.split_q
    )
    assert parts(256, (32, 8)) == 4
    assert parts(248, (32, 8)) == 1
    assert parts(512, (32, 8), mask=Mask(left=100, right=0)) == 1  # 228 queries see a key block
    assert parts(512, (32, 8), mask=Mask(left=130, right=0)) == 4


@pytest.mark.parametrize("head_dim", [64, 128])
def test_fewer_warpgroups_for_few_tiles(head_dim):
    warpgroups = lambda batch, length, heads: (
        chosen(batch, length, length, (heads, heads), head_dim, **CAUSAL).forward.warpgroups
    )
    assert warpgroups(1, 512, 16) == 1
    assert warpgroups(64, 50, 16) == 1  # a second warpgroup would have no rows
    assert warpgroups(1, 4096, 16) == {64: 3, 128: 2}[head_dim]


def test_tiles_of_192_rows_where_they_cover_little_more():
    warpgroups = lambda length, **spec: (
        chosen(16, length, length, (32, 32), 64, **spec).forward.warpgroups
    )
    assert warpgroups(512, **CAUSAL) == warpgroups(256) == 2
    assert warpgroups(2048, **CAUSAL) == warpgroups(512) == 3


@pytest.mark.parametrize("spec", [{}, CAUSAL], ids=["full", "causal"])
def test_few_queries_are_packed(spec):
    packed = lambda batch, q_len, kv_len, heads, head_dim=128: (
        chosen(batch, q_len, kv_len, heads, head_dim, **spec).forward.packed
    )
    grouped, alone = (32, 8), (16, 16)
    assert packed(1, 32, 4096, grouped) and packed(1, 128, 8192, grouped)
    assert packed(1, 128, 4096, alone) and packed(1, 512, 8192, (8, 8), 64)
    assert not packed(4, 128, 4096, grouped) and not packed(1, 256, 32768, grouped)
    # A tile holds 16 queries of four heads, which read their keys once.
    assert packed(32, 16, 4096, grouped) and not packed(32, 17, 4096, grouped)
    assert packed(1, 64, 4096, alone) and not packed(8, 64, 4096, alone)


def test_few_keys_are_not_packed():
    packed = lambda q_len, kv_len, **spec: (
        chosen(1, q_len, kv_len, (8, 8), 64, **spec).forward.packed
    )
    assert packed(64, 1024) and not packed(16, 1016)
    assert not packed(1024, 1024) and not packed(512, 8184)


def test_only_what_decoding_takes_is_packed():
    packed = lambda **spec: chosen(1, 16, 8192, (32, 8), 128, **spec).forward.packed
    assert packed(softcap=30.0)
    assert not packed(max_logit=True)
    assert not packed(mask=Mask(right=5))
    assert not packed(mask=Mask(left=100, right=0))


def test_packed_rows_are_refused_where_decoding_has_no_such_argument():
    asked = lambda packed, **spec: chosen(
        1, 16, 8192, (32, 8), 128, {"forward": {"packed": packed}}, **spec
    )
    assert not asked(False).forward.packed
    with pytest.raises(ValueError, match="flash_decode do not take this call"):
        asked(True, dropout_rate=0.5)
