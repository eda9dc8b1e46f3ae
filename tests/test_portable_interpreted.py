"""The portable kernels themselves, on CPU: right, and no tile read before it has arrived."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flash_pallas import BlockMask
from flash_pallas.backends.gpu import bias_tiles
from flash_pallas.backends.portable import PortableBackend
from flash_pallas.backends.portable.backward.dbias import kernel

from . import checks
from .cases import Case
from .hopper_cases import INTERPRETED, MAXIMA, MODIFIERS
from .interpreter import race_checked
from .portable_cases import WIDE

BACKEND = PortableBackend(interpret=True, capability="8.0")

# Cases that differ from others in which Hopper kernels run, and are one kernel here; they all run
# on a GPU.
SAME_KERNEL = (
    *("_split", "document_", "long_", "softcap_saturated", "softcap_wide"),
    *("softcap_small", "softcap_straddles", "softcap_scale", "rising_", "whole_key_blocks"),
)
CASES = [
    case
    for case in (*INTERPRETED, *MODIFIERS, *MAXIMA)
    if not any(part in case.name for part in SAME_KERNEL)
]


@pytest.mark.thorough(always=["bias_infinite_score_mod"])
@pytest.mark.interpret
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels(case):
    assert_right(case)


# Whose deterministic backward runs too; all of those that are so anyway do.
SPLIT = (
    *("d64", "d64_ragged", "d128_causal", "d256", "d80_padded_narrow_values", "window_causal_128"),
    *("padded", "kv_lengths", "bias_1NTS", "mask_bias", "softcap_dropout", "alibi", "everything"),
)


def assert_right(case, blocks=None, backend=BACKEND):
    """Checks that kernels are free of races, and as near to the oracle as they have to be."""
    with race_checked():
        checks.assert_matches_oracle(checks.bind(backend, blocks), case, kernels=True)


def named(name: str):
    (case,) = (case for case in CASES if case.name == name)
    return case


@pytest.mark.thorough(always=["False"])
@pytest.mark.interpret
@pytest.mark.parametrize("mask_all", [False, True])
def test_keys_past_the_end_weigh_nothing(mask_all):
    """Checks keys past the end: their score 0 exceeds all others so far that exp overflows."""
    q = jnp.full((1, 64, 1, 64), 30.0, jnp.bfloat16)
    call = checks.bind(BACKEND, {"fused": {"mask_all": mask_all}})
    with race_checked():
        of = lambda q: call(q, -q[:, :40], q[:, :40])[0].astype(jnp.float32).sum()
        dq = jax.jit(jax.grad(of))(q)
        assert jnp.isfinite(dq).all()


@pytest.mark.thorough(always=["d64"])
@pytest.mark.interpret
@pytest.mark.parametrize("name", SPLIT)
def test_deterministic_kernels(name):
    assert_right(dataclasses.replace(named(name), deterministic=True))


@pytest.mark.thorough
@pytest.mark.interpret
@pytest.mark.parametrize("name", ["everything", "packed_causal", "d64"])
def test_other_tiles(name):
    """Checks that other tile sizes that a caller may ask for change nothing."""
    blocks = {
        "forward": {"rows": 64, "columns": 48, "slots": 2},
        "dkv": {"rows": 128, "columns": 16},
        "dq": {"rows": 128, "columns": 32},
    }
    assert_right(dataclasses.replace(named(name), deterministic=True), blocks)


@pytest.mark.thorough(always=["sinks-{'rows': 64}"])
@pytest.mark.interpret
@pytest.mark.parametrize("fields", [{"slots": 2}, {"rows": 64}], ids=str)
@pytest.mark.parametrize("name", ["everything", "jump_128", "d80_padded_narrow_values", "sinks"])
def test_weights_through_shared_memory(name, fields):
    """Checks that weights pass through shared memory correctly, also where O has few columns."""
    assert_right(named(name), {"forward": fields | {"shared_weights": True}})


@pytest.mark.thorough
@pytest.mark.interpret
@pytest.mark.parametrize(
    "fields",
    [
        {"rows": 64, "columns": 64, "slots": 2},
        {"columns": 64, "mask_all": False, "heads": 3},
        {"mask_all": True, "stagger": True, "heads": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["d64_causal", "everything", "d64_ragged", "window"])
def test_other_tiles_of_the_fused_backward(name, fields):
    assert_right(named(name), {"fused": fields})


@pytest.mark.thorough
@pytest.mark.interpret
@pytest.mark.parametrize("name", ["d128_causal", "window_causal_128", "dropout_causal_128"])
def test_weights_that_registers_have_no_room_for(name):
    """Checks weights that the fused backward reads back, except where dropout needs them as is."""
    backend = dataclasses.replace(BACKEND, capability="9.0")
    assert_right(named(name), {"fused": {"columns": 128, "slots": 1}}, backend)


def sums(name: str, **fields):
    """Returns a case whose modifiers have gradients; the last Q and KV tiles are partial."""
    return Case(name, **({"T": 100, "S": 136, "N": 2, "K": 1, "dtype": "bfloat16"} | fields))


# What is summed over, and what else changes the scores.
SUMS = (
    sums("full", bias="BNTS", B=2),
    sums("of_entries_causal", bias="1NTS", B=3, causal=True, T=130, S=130),
    sums("of_heads_dropout", bias="B1TS", B=2, N=4, K=2, dropout_rate=0.3),
    sums("of_all_lengths", bias="11TS", B=3, kv_lengths=(100, 0, 136), q_lengths=(9, 70, 100),
         poison=True),
    sums("documents_softcap", bias="1NTS", B=2, segments="packed", softcap=3.0, T=130, S=130),
    sums("columns", bias="111S", B=2, causal=True, q_offset=20),
    sums("columns_of_heads_window", bias="1N1S", B=2, window=(40, 10), dropout_rate=0.2),
    sums("columns_lengths", bias="B11S", B=2, kv_lengths=(100, 31), poison=True),
    sums("rows", bias="11T1", B=2, causal=True, q_offset=-30),
    sums("rows_of_heads", bias="1NT1", B=2, kv_lengths=(100, 31), alibi="BN"),
    sums("rows_documents", bias="B1T1", B=2, segments="unsorted", score_mod="per_entry"),
)  # fmt: skip


@pytest.mark.thorough
@pytest.mark.interpret
@pytest.mark.parametrize("case", SUMS, ids=str)
def test_gradients_of_what_modifies_scores(case):
    assert_right(case)


@pytest.mark.thorough
@pytest.mark.interpret
@pytest.mark.parametrize(
    ("case", "blocks"),
    [
        (SUMS[1], {"score_tiles": {"rows": 64, "columns": 96, "warpgroups": 1, "slots": 1}}),
        (SUMS[1], {"score_tiles": {"columns": 64, "keep_bias": True}}),
        (SUMS[2], {"score_tiles": {"rows": 64, "columns": 32, "slots": 1, "keep_bias": True}}),
        (SUMS[5], {"score_lines": {"rows": 128, "columns": 48, "slots": 1}}),
        (SUMS[9], {"score_lines": {"rows": 64, "columns": 16}}),
    ],
    ids=str,
)
def test_other_tiles_of_sums(monkeypatch, case, blocks):
    """Checks sums over all members in one CTA per tile, in sections of two tiles."""
    monkeypatch.setattr(kernel, "ENOUGH_BLOCKS", 1)
    monkeypatch.setattr(bias_tiles, "SECTION_TILES", 2)
    assert_right(case, blocks)


def blocks(name: str, recipe: str, **fields):
    """Returns a case with a block mask, whose last blocks are cut by the ends."""
    sizes = {"T": 200, "S": 180, "N": 2, "K": 1, "dtype": "bfloat16"}
    return Case(name, **(sizes | {"block_mask": recipe} | fields))


# What reads lists and what else hides keys or has a gradient, besides those of hopper_cases.
BLOCKS = (
    blocks("window", "window and global", T=300, S=300, N=1),
    blocks("heads", "small blocks by heads", B=2, N=4, K=2),
    blocks("kv_heads_padded", "listed by KV heads", T=260, S=260, N=4, K=2, segments="padded",
           poison=True),
    blocks("lengths", "window and global", B=2, q_lengths=(200, 40), kv_lengths=(0, 100),
           poison=True),
    blocks("offset_array", "small blocks by heads", B=2, causal=True, q_offset=(20, -90)),
    blocks("positions", "small blocks by heads", B=2, causal=True, q_positions="shifted"),
    blocks("documents", "prefix", B=2, T=180, segments="packed"),
    blocks("mask", "small blocks by heads", mask="B11S"),
    blocks("bias_of_heads", "small blocks by heads", bias="11TS", N=4, K=2),
    blocks("bias_of_lengths", "tall blocks", bias="BNTS", B=2, kv_lengths=(180, 70), poison=True),
    blocks("bias_columns", "prefix", bias="1N1S", causal=True),
    blocks("alibi", "prefix", alibi="N", sinks=True, max_logit=True),
    blocks("score_mod", "window and global", score_mod="per_entry", softcap=3.0),
)  # fmt: skip


@pytest.mark.thorough
@pytest.mark.interpret
@pytest.mark.parametrize("case", BLOCKS, ids=str)
def test_block_masks(case):
    assert_right(case)


@pytest.mark.thorough
@pytest.mark.interpret
@pytest.mark.parametrize("case", BLOCKS[:6], ids=str)
def test_deterministic_kernels_with_block_masks(case):
    assert_right(dataclasses.replace(case, deterministic=True))


@pytest.mark.thorough
@pytest.mark.interpret
@pytest.mark.parametrize(
    ("case", "sizes"),
    [
        (BLOCKS[1], {"forward": {"columns": 16, "slots": 2}, "fused": {"mask_all": True}}),
        (BLOCKS[0], {"forward": {"rows": 64, "columns": 32}, "fused": {"slots": 2, "columns": 64}}),
        (BLOCKS[8], {"score_tiles": {"columns": 32, "warpgroups": 1, "keep_bias": True}}),
        (BLOCKS[11], {"score_lines": {"columns": 16, "slots": 1}}),
    ],
    ids=str,
)
def test_other_tiles_with_block_masks(case, sizes):
    assert_right(case, sizes)


@pytest.mark.thorough(always=["512-8.6"])
@pytest.mark.interpret
@pytest.mark.parametrize("capability", ["8.0", "8.6"])
@pytest.mark.parametrize("case", WIDE, ids=str)
def test_wide_heads(case, capability):
    assert_right(case, backend=dataclasses.replace(BACKEND, capability=capability))


@pytest.mark.thorough
@pytest.mark.interpret
@pytest.mark.parametrize("name", ["d64_causal", "sinks", "mask_bias", "alibi"])
def test_tiles_in_turns(name):
    """Checks tiles that take turns where one warpgroup has all columns."""
    turns = {kernel: {"turns": True} for kernel in ("forward", "dkv", "dq")}
    assert_right(dataclasses.replace(named(name), deterministic=True), turns)


@pytest.mark.thorough
@pytest.mark.interpret
@pytest.mark.parametrize("deterministic", [False, True])
def test_blocks_of_no_list_are_not_read(deterministic):
    """Checks keys that no list of their head names, and queries whose list is empty: all NaN."""
    index = np.array([[[0, -1], [-1, -1], [1, 0]], [[2, 0], [-1, -1], [2, -1]]], np.int32)
    mask = BlockMask.from_indices(index[None], q_len=192, kv_len=192, block=(64, 64))
    call = checks.bind(BACKEND)
    drawn = np.random.default_rng(0).standard_normal((5, 1, 192, 2, 64))
    q, k, v, do = (jnp.asarray(x, jnp.bfloat16) for x in drawn[:4])
    bias = jnp.asarray(drawn[4, :, :, :1, :1].reshape(1, 1, 192, 1) + drawn[4, 0, :, 0, 1])
    bias = bias.astype(jnp.float32)

    def results(unread: float):
        queries = lambda x: x.at[:, 64:128].set(unread)
        keys = lambda x: x.at[:, 128:, 0].set(unread).at[:, 64:128, 1].set(unread)
        run = lambda q, k, v, bias: call(
            q, k, v, bias=bias, block_mask=mask, deterministic=deterministic
        )[0]
        o, pull = jax.vjp(run, queries(q), keys(k), keys(v), bias)
        return o, *pull(queries(do))

    with race_checked():
        zeros, nans = (jax.jit(results)(x) for x in (0.0, jnp.nan))
    for x, y in zip(zeros, nans, strict=True):
        np.testing.assert_allclose(x.astype(jnp.float32), y.astype(jnp.float32))
    o, dq, dk, dv, dbias = zeros
    assert not o[:, 64:128].any() and not dq[:, 64:128].any()
    assert not dk[:, 128:, 0].any() and not dv[:, 64:128, 1].any()
    assert not dbias[:, :, 64:128].any() and not dbias[:, :, :64, 64:128].any()
