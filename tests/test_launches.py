"""Launch counts of the fused backward, and which of them a caller may ask for."""

from __future__ import annotations

import dataclasses
import operator

import jax
import jax.numpy as jnp
import pytest

from flash_pallas.backends.gpu import launch as gpu_launch
from flash_pallas.backends.hopper import HopperBackend
from flash_pallas.backends.hopper.backward.fused.launches import (
    fitting,
    launches_of,
    origins,
)
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


def test_portions_where_each_keeps_multiprocessors_busy():
    def launches(*sizes):
        found = chosen(*sizes, biased=True)
        return found.num_launches, found.kv_launches

    assert launches(128, 1024, (4, 4), 16) == launches(128, 1024, (4, 4), 64) == (4, 1)
    assert launches(128, 512, (4, 4), 64) == launches(16, 1024, (4, 4), 64) == (1, 1)
    assert launches(32, 1024, (8, 8), 64) == (1, 1)  # two of seven rounds each cost 4 to 8 %
    assert launches(256, 1024, (2, 2), 64) == (2, 1)
    assert launches(128, 2048, (6, 6), 64) == (3, 1)
    assert launches(128, 4096, (5, 5), 64) == (1, 1)  # no equal portions of heads
    assert chosen(128, 4096, (4, 4), 64).num_launches == 1


def test_portions_of_keys_where_sums_of_the_bias_would_be_large():
    """Checks portions of keys: at most a quarter of Q's bytes, if each launch keeps SMs busy."""
    portions = lambda *sizes: chosen(*sizes, biased=True).kv_launches
    assert [portions(128, length, (4, 4), 16) for length in (1024, 2048, 4096)] == [1, 2, 4]
    assert [portions(128, length, (4, 4), 32) for length in (2048, 4096)] == [1, 2]
    assert portions(128, 4096, (4, 4), 64) == 1
    assert portions(32, 8192, (4, 4), 16) == 2  # of 62 rounds each head has 15, for two launches


def test_a_persistent_grid_where_each_cta_has_several_tiles():
    found = chosen(128, 1024, (4, 4), 64, biased=True)
    assert (found.persistent_clusters, found.kv_stages) == (66, 2)
    found = chosen(128, 4096, (4, 4), 16, biased=True)
    assert (found.persistent_clusters, found.kv_stages, found.stagger) == (66, 1, True)
    assert not chosen(128, 4096, (4, 4), 64, biased=True).persistent
    assert not chosen(128, 2048, (4, 4), 32, biased=True).persistent
    assert not chosen(16, 1024, (4, 4), 64, biased=True).persistent  # four rounds
    assert not chosen(16, 1024, HEADS, 64).persistent


def test_clusters_of_a_persistent_grid_have_as_many_tiles_but_for_one():
    blocks = dataclasses.replace(chosen(128, 1024, (4, 4), 16, biased=True), num_launches=1)
    problem = described(128, 1024, (4, 4), 16, biased=True)
    (launch,) = launches_of(problem, blocks)
    assert launch.total == 128 * 4 * 8 // 2 == 2048
    assert launch.grid == {"first": 64}  # 32 tiles each; 66 clusters would take as many
    (once,) = launches_of(problem, dataclasses.replace(blocks, persistent_clusters=1))
    assert once.grid == {"section": 4, "kv": 8, "pair": 64}


def test_without_the_gradient_of_the_bias():
    """Checks that without its sums the call with a bias takes one launch."""
    for length in (1024, 2048):
        found = without_sums(chosen(128, length, (4, 4), 64, biased=True))
        assert (found.bias_cluster, found.num_launches) == (1, 1)
        assert (found.kv_launches, found.persistent_clusters, found.kv_stages) == (1, 1, 1)
    plain = chosen(16, 1024, HEADS, 128)
    assert without_sums(plain) == plain


def test_shards_of_a_call_take_what_they_can():
    """Fits tiles of the whole call to its shards, which have fewer batch entries and heads."""
    whole = chosen(6, 256, (4, 4), 64, biased=True, blocks={"num_launches": 4})
    assert (whole.bias_cluster, whole.num_launches) == (2, 4)
    at = lambda *sizes: fitting(described(*sizes, 64, biased=True), whole)
    assert at(2, 256, (4, 4)) == at(2, 256, (8, 8)) == whole
    assert (at(4, 256, (1, 1)).bias_cluster, at(4, 256, (1, 1)).num_launches) == (2, 1)
    assert at(3, 256, (4, 4)).bias_cluster == 1  # three entries are no pairs
    plain = chosen(16, 1024, HEADS, 128)
    assert fitting(described(2, 1024, (1, 1), 128), plain) == plain
    halves = dataclasses.replace(plain, num_launches=2)
    assert fitting(described(1, 1024, (1, 1), 128), halves) == plain


def test_compute_warpgroups_that_load_take_one_launch():
    alone = HopperBackend(num_sms=132, trades_registers=False)
    found = chosen(128, 2048, (4, 4), 64, biased=True, backend=alone)
    assert (found.bias_cluster, found.num_launches) == (1, 1)


def test_which_pairs_a_launch_has():
    names = operator.attrgetter("entries", "heads", "first_block", "num_blocks")
    shares = lambda problem, blocks: [names(launch) for launch in launches_of(problem, blocks)]
    sizes = (4, 512, (3, 3), 128)
    problem = described(*sizes)
    by_heads = chosen(*sizes, blocks={"num_launches": 3})
    assert shares(problem, by_heads) == [(4, 1, 0, 4)]
    assert origins(problem, by_heads) == [(0, 0), (0, 1), (0, 2)]
    by_entries = chosen(*sizes, blocks={"num_launches": 6})
    assert shares(problem, by_entries) == [(2, 1, 0, 4)]
    assert origins(problem, by_entries)[:3] == [(0, 0), (2, 0), (0, 1)]


@pytest.mark.parametrize(
    ("blocks", "given", "message"),
    [
        ({"num_launches": 5}, {}, "'num_launches' is 5.* = 4 x 3 .*pass 'num_launches': 1"),
        ({"num_launches": 8}, {}, "'num_launches' is 8"),
        ({"num_launches": 2, "split_q": 2}, {}, "'num_launches' and 'split_q' exclude"),
        ({"kv_launches": 2}, {}, "'kv_launches' is 2.* KV tiles, 4,.*pass 'kv_launches': 1"),
        ({"persistent_clusters": 8}, {"mask": Mask(left=100, right=0)}, "the same Q tiles"),
        ({"persistent_clusters": 8}, {}, "'mask_all'"),
        ({"kv_stages": 2, "stages": 2, "do_stages": 2}, {}, "'kv_stages' needs it"),
    ],
)
def test_what_is_refused(blocks, given, message):
    with pytest.raises(ValueError, match=message):
        chosen(4, 512, (3, 3), 128, blocks=blocks, **given)


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
