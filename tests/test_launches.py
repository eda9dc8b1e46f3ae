"""Launch counts of the fused backward, and which of them a caller may ask for."""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest

import flash_pallas as fp
from flash_pallas.backends.gpu import launch as gpu_launch
from flash_pallas.backends.hopper import HopperBackend
from flash_pallas.backends.hopper.backward.fused.launches import fitting, launches_of
from flash_pallas.backends.hopper.backward.fused.tiles import without_sums
from flash_pallas.core.mask import Mask
from flash_pallas.core.problem import AttentionSpec, Operands, describe

BACKEND = HopperBackend(num_sms=132, trades_registers=True)


def described(batch, length, heads, head_dim, biased=False, **given):
    """Returns the problem of a call; heads are (query heads, KV heads)."""
    shape = lambda n: jax.ShapeDtypeStruct((batch, length, n, head_dim), jnp.bfloat16)
    spec = AttentionSpec(scale=1.0, mask=given.pop("mask", Mask()))
    if biased:
        given["bias"] = jax.ShapeDtypeStruct((1, heads[0], length, length), jnp.bfloat16)
    q, kv = map(shape, heads)
    return describe(Operands(q, kv, kv)._replace(**given), spec)


def chosen(*sizes, blocks=None, backend=BACKEND, **given):
    """Returns the tiles of the fused backward."""
    override = blocks and {"fused": blocks}
    return backend.attention.plan(described(*sizes, **given), override).backward


HEADS = (16, 16)


def test_where_ctas_of_a_head_start_apart():
    """Checks that CTAs start apart up to head dim 64, in one loop that masks nothing."""

    def staggers(*sizes, **given):
        problem = described(*sizes, **given)
        return launches_of(problem, BACKEND.attention.plan(problem, None).backward)[0].staggers

    assert all(staggers(128, 1024, (4, 4), dim, biased=True) for dim in (16, 32, 64))
    assert staggers(2, 1024, (8, 1), 64) and not staggers(2, 1024, (8, 1), 128)
    assert not staggers(2, 1024, HEADS, 64, mask=Mask(right=0))


@pytest.mark.parametrize(
    "given", [{"mask": Mask(right=0)}, {"mask": Mask(left=100, right=0)}, {"length": 500}], ids=str
)
@pytest.mark.parametrize("biased", [False, True])
def test_ctas_start_together_where_tiles_have_two_loops(given, biased):
    """Checks a loop for masked tiles and one for others, which callers may ask for."""
    given = {"length": 512} | given
    problem = described(4, given.pop("length"), (2, 2), 64, biased=biased, **given)
    blocks = BACKEND.attention.plan(problem, {"fused": {"mask_all": False}}).backward
    assert not any(launch.staggers for launch in launches_of(problem, blocks))


@pytest.mark.parametrize(
    ("blocks", "length", "message"),
    [
        ({"split_q": 2, "mask_all": False}, 500, "'split_q' needs 'mask_all'"),
        ({"split_q": 65}, 512, "from 1 to 64"),
        ({"split_q": 2, "bias_cluster": 2}, 512, "'bias_cluster' is 2"),
    ],
)
def test_what_is_refused(blocks, length, message):
    with pytest.raises(ValueError, match=message):
        chosen(4, length, (3, 3), 128, blocks=blocks)


def test_without_the_gradient_of_the_bias():
    found = chosen(128, 1024, (4, 4), 64, biased=True)
    assert found.bias_cluster == 2
    assert without_sums(found) == dataclasses.replace(found, bias_cluster=1)
    plain = chosen(16, 1024, HEADS, 128)
    assert without_sums(plain) == plain


def test_shards_of_a_call_take_what_they_can():
    """Fits tiles of the whole call to its shards, which have fewer batch entries and heads."""
    whole = chosen(6, 256, (4, 4), 64, biased=True)
    assert whole.bias_cluster == 2
    at = lambda *sizes: fitting(described(*sizes, 64, biased=True), whole)
    assert at(2, 256, (4, 4)) == at(2, 256, (8, 8)) == at(4, 256, (1, 1)) == whole
    assert at(3, 256, (4, 4)).bias_cluster == 1  # three entries are no pairs
    plain = chosen(16, 1024, HEADS, 128)
    assert fitting(described(2, 1024, (1, 1), 128), plain) == plain


def test_compute_warpgroups_that_load_sum_no_bias():
    alone = HopperBackend(num_sms=132, trades_registers=False)
    assert chosen(128, 2048, (4, 4), 64, biased=True, backend=alone).bias_cluster == 1


def test_the_launch_for_large_logits_has_a_cta_for_each_pair():
    """Checks grids: all KV tiles of a pair have one CTA, also where clusters sum a bias."""
    problem = described(4, 8192, (32, 32), 64, mask=Mask(right=0))
    near, far = launches_of(problem, BACKEND.attention.plan(problem, None).backward)
    assert near.grid == {"section": 32, "kv": 64, "pair": 4} and not near.all_kv_tiles
    assert far.grid == {"first": 128} and far.all_kv_tiles
    problem = described(128, 1024, (4, 4), 64, biased=True)
    near, far = launches_of(problem, BACKEND.attention.plan(problem, None).backward)
    assert near.grid == {"section": 16, "kv": 8, "pair": 16}
    assert far.grid == {"first": 256} and far.blocks.bias_cluster == near.blocks.bias_cluster == 2


@pytest.mark.parametrize(("head_dim", "launches"), [(64, 2), (56, 1), (48, 2), (40, 1)])
def test_rows_that_the_tiles_for_large_logits_cannot_read_have_one_launch(head_dim, launches):
    x = jax.ShapeDtypeStruct((88, 260, 4, head_dim), jnp.bfloat16)
    with fp.target("H200"):
        jaxpr = jax.make_jaxpr(jax.grad(lambda x: fp.flash_attention(x, x, x).sum()))(x)
    names = re.findall(r"name=(flash_pallas_backward_fused\w*)", str(jaxpr))
    assert len(names) == launches


@pytest.mark.parametrize(
    ("shape", "dtype", "copied"),
    [
        ((64,), "int32", True),  # lengths, which may begin anywhere in an array
        ((64, 4), "int32", True),
        ((64, 64), "int32", False),  # rows of 256 bytes
        ((1, 64), "int32", True),
        ((), "int32", True),
        ((1, 4096, 1, 64), "bfloat16", True),  # keys of 128 bytes
        ((1, 4096, 1, 128), "bfloat16", False),
        ((2, 4096, 1, 64), "bfloat16", False),
        ((512, 64, 2, 64), "int8", False),
        ((512, 2), "float32", True),  # scales of pages
    ],
    ids=str,
)
def test_operands_that_may_be_misaligned(shape, dtype, copied):
    """Checks which operands XLA has to copy where they are slices: see `launch.aligned`."""
    text = str(jax.make_jaxpr(gpu_launch.aligned)(jax.ShapeDtypeStruct(shape, dtype)))
    assert ("optimization_barrier" in text) == copied
