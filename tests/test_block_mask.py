"""BlockMask: how one is made and combined, and attention with it on xla against the oracle."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import jax.test_util
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import flash_pallas as fp
from flash_pallas import BlockMask, flash_attention, reference
from flash_pallas.backends.xla.grid import XlaBlocks
from flash_pallas.compat import flex
from flash_pallas.core import block_mask as module
from flash_pallas.frontend import validate
from flash_pallas.frontend.arguments import Arguments

from . import block_masks, checks
from .cases import Case
from .checks import explain_on
from .test_sharding import ATOL, TYPES, mesh_of

T, S = 300, 330  # no multiples of a block
SMALL = (64, 64)


def draw(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def inputs(*batch, length=192, heads=4, kv_heads=2, head_dim=8):
    shapes = [(*batch, length, n, head_dim) for n in (heads, kv_heads, kv_heads)]
    return [draw(*shape, seed=seed) for seed, shape in enumerate(shapes)]


def places(*leading):
    """Returns b, n, i, j of every pair, as numpy arrays that broadcast."""
    return np.meshgrid(*map(np.arange, (*leading, T, S)), indexing="ij", sparse=True)


def random_indices(batch, heads, length=192, block=64, seed=0):
    """Draws lists of half of the blocks, with numbers that repeat and some of none."""
    blocks = length // block
    shape = batch, heads, blocks, 1 + blocks // 2
    return np.random.default_rng(seed).integers(-1, blocks, shape).astype(np.int32)


def from_indices(index, length=192):
    return BlockMask.from_indices(index, q_len=length, kv_len=length, block=SMALL)


def oracle(q, k, v, block_mask, **options):
    """Computes (o, lse) with the dense form of a block mask."""
    return reference.attention(q, k, v, mask=dense(block_mask, q.shape[2]), **options)


def dense(block_mask, heads):
    found = block_mask.to_dense()
    own = found.shape[1]
    return found if own in (1, heads) else jnp.repeat(found, heads // own, axis=1)


def value_and_gradients(attend):
    """Returns (q, k, v, *others) -> (o, gradients of q, k and v) of a loss with any cotangent."""

    def loss(q, k, v, *others):
        o = attend(q, k, v, *others)
        return jnp.sum(jnp.sin(o)), o

    def run(*args):
        (_, o), grads = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(*args)
        return o, grads

    return jax.jit(run)


def assert_close(found, expected):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, **ATOL)


# --- How masks are made ---------------------------------------------------------------------------


@pytest.mark.parametrize("block", [(128, 128), (64, 128), (192, 64)], ids=str)
def test_a_mask_mod_that_captures_traced_arrays(block):
    prefix, widths = np.array([70, 250]), np.array([[40, 128, 400], [10, 64, 200]])

    @jax.jit
    def make(prefix, widths):
        seen = lambda b, n, i, j: (j < prefix[b]) | ((j <= i) & (i - j < widths[b, n]))
        return BlockMask.from_mask_mod(seen, 2, 3, T, S, block=block)

    found = make(prefix, widths)
    b, n, i, j = places(2, 3)
    right = (j < prefix[b]) | ((j <= i) & (i - j < widths[b, n]))
    np.testing.assert_array_equal(found.to_dense(), right)
    pads = [(0, 0), (0, 0), (0, -T % block[0]), (0, -S % block[1])]
    some = np.pad(right, pads).reshape(2, 3, -(-T // block[0]), block[0], -1, block[1])
    np.testing.assert_array_equal(found.lists[..., 1], some.any((3, 5)).sum(-1))
    assert found.sparsity == 1.0 - some.any((3, 5)).mean()


def test_a_mask_mod_of_many_blocks_is_looked_at_in_parts(monkeypatch):
    make = lambda: BlockMask.from_mask_mod(lambda b, n, i, j: j + n <= i, 1, 2, T, S, block=SMALL)
    whole = make()
    monkeypatch.setattr(module, "PAIRS_AT_ONCE", 3 * 64 * 384)  # 3 rows of 10 at one time
    module._lists_of_mod.clear_cache()
    np.testing.assert_array_equal(make().lists, whole.lists)


def test_indices_in_any_order():
    index = np.array([[2, 0, -1], [1, 1, 1], [-1, -1, -1], [0, 1, 2], [5, -7, 3]], np.int32)
    found = BlockMask.from_indices(index[None, None], q_len=T, kv_len=S, block=SMALL)
    shown = np.zeros((5, 6), bool)
    for row, numbers in enumerate(index):
        shown[row, [x for x in numbers if x >= 0]] = True
    right = np.repeat(np.repeat(shown, 64, 0), 64, 1)[:T, :S]
    np.testing.assert_array_equal(found.to_dense(), right[None, None])
    assert found.sparsity == 1.0 - shown.mean()
    np.testing.assert_array_equal(found.lists[..., 0], 0)  # nothing is partial


def test_counts_cut_lists():
    index = np.array([[2, 0, 1], [1, 0, 2], [0, 1, 2]], np.int32)[None, None]
    counts = np.array([[[1, 0, 3]]], np.uint8)
    found = BlockMask.from_indices(index, counts, q_len=192, kv_len=192, block=SMALL)
    shown = np.array([[0, 0, 1], [0, 0, 0], [1, 1, 1]], bool)
    np.testing.assert_array_equal(found.to_dense()[0, 0, ::64, ::64], shown)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint32", "int64"])
@pytest.mark.parametrize("of", [np, jnp], ids=["numpy", "jax"])
def test_indices_of_any_integer_dtype(of, dtype):
    with jax.enable_x64(True):
        index = of.asarray(random_indices(2, 2).clip(0), dtype)
        found = from_indices(index)
    np.testing.assert_array_equal(found.lists, from_indices(random_indices(2, 2).clip(0)).lists)


def test_numbers_past_the_end_of_a_jax_array_are_no_blocks():
    with jax.enable_x64(True):
        index = jnp.array([[3, 2**32, 0], [2**31 + 1, 1, -(2**40)], [9, 2, 2]])[None, None]
        shown = from_indices(index).to_dense()[0, 0, ::64, ::64]
    np.testing.assert_array_equal(shown, np.eye(3, dtype=bool))


def test_lists_without_entries_show_nothing():
    found = from_indices(np.zeros((1, 1, 3, 0), np.int32))
    assert found.sparsity == 1.0 and not found.to_dense().any()
    o, (dq, dk, dv) = value_and_gradients(partial(flash_attention, block_mask=found))(*inputs(1))
    assert not any(map(jnp.any, (o, dq, dk, dv)))


@pytest.mark.parametrize("of", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
def test_a_dense_mask_is_what_it_was(of):
    rng = np.random.default_rng(0)
    states = np.repeat(np.repeat(rng.integers(0, 3, (2, 1, 5, 6)), 64, 2), 64, 3)[..., :T, :S]
    mask = rng.random(states.shape) < 0.5 * states
    found = BlockMask.from_dense(of(mask), block=SMALL)
    np.testing.assert_array_equal(found.to_dense(), mask)
    np.testing.assert_array_equal(found.lists[..., 1], (states[:, :, ::64, ::64] > 0).sum(-1))
    np.testing.assert_array_equal(found.lists[..., 0], (states[:, :, ::64, ::64] == 1).sum(-1))


def test_a_picture():
    mask = BlockMask.from_mask_mod(
        lambda b, n, i, j: (j <= i) & (i - j < 129), 1, 1, 448, 448, block=SMALL
    )
    assert mask.plot().splitlines() == [
        "▒······",
        "█▒·····",
        "▒█▒····",
        "·▒█▒···",
        "··▒█▒··",
        "···▒█▒·",
        "····▒█▒",
    ]
    assert mask.plot(width=4).splitlines() == ["▒···", "▒▒··", "·▒▒·", "··▒▒"]


# --- Several masks --------------------------------------------------------------------------------

lengths = np.array([100, 290])
MASKS = {
    "mask_mod": lambda: BlockMask.from_mask_mod(
        lambda b, n, i, j: (j <= i) | (j < jnp.asarray(lengths)[b]), 2, 1, T, S
    ),
    "another mask_mod": lambda: BlockMask.from_mask_mod(
        lambda b, n, i, j: i - j < 50 * jnp.arange(1, 4)[n], 1, 3, T, S
    ),
    "indices": lambda: BlockMask.from_indices(
        np.array([[0, -1], [0, 2], [1, 1]], np.int32)[None, None], q_len=T, kv_len=S
    ),
    "other indices": lambda: BlockMask.from_indices(
        np.array([[[[2], [1], [-1]]], [[[0], [0], [1]]]], np.int32), q_len=T, kv_len=S
    ),
    "dense": lambda: BlockMask.from_dense(np.random.default_rng(0).random((2, 3, T, S)) < 0.5),
    "another dense": lambda: BlockMask.from_dense(np.tri(T, S, dtype=bool)[None, None]),
}


@pytest.mark.thorough(
    always=["another mask_mod-mask_mod", "indices-dense", "other indices-indices", "dense-dense"]
)
@pytest.mark.parametrize("other", MASKS)
@pytest.mark.parametrize("one", MASKS)
def test_both_and_either(one, other):
    a, b = MASKS[one](), MASKS[other]()
    both = a & b
    np.testing.assert_array_equal(both.to_dense(), a.to_dense() & b.to_dense())
    if a.kind != b.kind:
        with pytest.raises(ValueError, match="both must be made from a mask_mod, both from"):
            _ = a | b
        with pytest.raises(ValueError, match=f"{both.kind} and from {both.kind}"):
            _ = both | both
    else:
        np.testing.assert_array_equal((a | b).to_dense(), a.to_dense() | b.to_dense())
        # Once more: what was joined is as right as what was made.
        again = (both | a).to_dense()
        np.testing.assert_array_equal(again, np.broadcast_to(a.to_dense(), again.shape))


@pytest.mark.thorough
def test_attention_to_what_both_show():
    q, k, v = inputs(2, heads=3, kv_heads=1)
    near = lambda b, n, i, j: (i - j < 30 * (n + 1)) & (j <= i)
    mask = BlockMask.from_mask_mod(near, 1, 3, 192, 192, block=SMALL)
    mask &= from_indices(random_indices(2, 1))
    mask &= BlockMask.from_dense(draw(1, 1, 192, 192, seed=4) < 0.5, block=SMALL)
    found, right = (
        value_and_gradients(f)(q, k, v)
        for f in (
            partial(flash_attention, block_mask=mask, mask_mod=lambda b, n, i, j: (i + j) % 3 != 0),
            lambda *x: oracle(*x, mask, mask_mod=lambda b, n, i, j: (i + j) % 3 != 0)[0],
        )
    )
    assert_close(found, right)


# --- What is refused ------------------------------------------------------------------------------

INDEX = np.zeros((1, 1, 3, 2), np.int32)
causal = lambda b, n, i, j: j <= i
of_mod = partial(BlockMask.from_mask_mod, causal)
of_mod_with = lambda mod: BlockMask.from_mask_mod(mod, 1, 1, T, S)
of_index = partial(BlockMask.from_indices, q_len=192, kv_len=192, block=SMALL)
REFUSED = {
    "a mask_mod that is none": (
        lambda: BlockMask.from_mask_mod(3, 1, 1, T, S),
        TypeError,
        "mask_mod must be a function, got 3",
    ),
    "a mask_mod of integers": (
        lambda: BlockMask.from_mask_mod(lambda b, n, i, j: i + j, 1, 1, T, S),
        TypeError,
        "must return one bool",
    ),
    "a mask_mod that indexes by head and position": (
        lambda: of_mod_with(lambda b, n, i, j: jnp.ones((1, T), bool)[n, i]),
        ValueError,
        "cannot be traced into a kernel",
    ),
    "a mask_mod that indexes by both positions": (
        lambda: of_mod_with(lambda b, n, i, j: jnp.ones((T, S), bool)[i, j]),
        ValueError,
        "cannot be traced into a kernel",
    ),
    "no heads": (lambda: of_mod(1, 0, T, S), ValueError, "heads is 0"),
    "a batch that is no int": (lambda: of_mod(2.0, 1, T, S), ValueError, "batch is 2.0"),
    "no queries": (lambda: of_mod(1, 1, 0, S), ValueError, "q_len is 0"),
    "a length that is no int": (lambda: of_mod(1, 1, 3.5, S), TypeError, "must be ints"),
    "queries of a block": (lambda: of_mod(1, 1, T, S, block=(96, 64)), ValueError, "multiple of"),
    "keys of a block": (lambda: of_mod(1, 1, T, S, block=(128, 256)), ValueError, "64 or 128"),
    "one size of a block": (lambda: of_mod(1, 1, T, S, block=128), TypeError, "a pair"),
    "indices that are floats": (lambda: of_index(INDEX * 1.0), TypeError, "integers, got float64"),
    "indices in a list": (lambda: of_index([[[[0]]]]), TypeError, "integers, got list"),
    "indices of rank 3": (
        lambda: of_index(INDEX[0]),
        ValueError,
        r"\(1, 3, 2\).*B or 1, N or 1, 3",
    ),
    "too few lists": (lambda: of_index(INDEX[:, :, :2]), ValueError, "the 3 blocks of 64 queries"),
    "a number past the last": (lambda: of_index(INDEX + 3), ValueError, "contains 3: there are 3"),
    "counts of another shape": (
        lambda: of_index(INDEX, np.zeros((1, 1, 2), np.int32)),
        ValueError,
        r"counts has shape \(1, 1, 2\): it must be \(1, 1, 3\)",
    ),
    "counts that are bools": (
        lambda: of_index(INDEX, np.zeros((1, 1, 3), bool)),
        TypeError,
        "counts must be an array of integers, got bool",
    ),
    "a dense mask of floats": (
        lambda: BlockMask.from_dense(jnp.ones((1, 1, T, S))),
        TypeError,
        "mask must be an array of bool, got float32",
    ),
    "a dense mask that is no array": (
        lambda: BlockMask.from_dense([[True]]),
        TypeError,
        "mask must be an array of bool",
    ),
    "a dense mask of rank 2": (
        lambda: BlockMask.from_dense(jnp.ones((T, S), bool)),
        ValueError,
        r"\(300, 330\): it must be \[B or 1",
    ),
    "& of other lengths": (lambda: of_mod(1, 1, T, S) & of_mod(1, 1, S, T), ValueError, "same"),
    "& of other blocks": (
        lambda: of_mod(1, 1, T, S) & of_mod(1, 1, T, S, block=SMALL),
        ValueError,
        "must be the same",
    ),
    "& of other heads": (lambda: of_mod(1, 2, T, S) & of_mod(1, 4, T, S), ValueError, "2 and of 4"),
    "| of other batches": (
        lambda: of_mod(2, 1, T, S) | of_mod(3, 1, T, S),
        ValueError,
        "of 2 and of 3 batch entries",
    ),
    "& of an array": (
        lambda: of_mod(1, 1, T, S) & jnp.ones((1, 1, T, S), bool),
        TypeError,
        "unsupported operand|not a valid JAX|not supported",
    ),
}


@pytest.mark.parametrize(("make", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_made(make, error, message):
    with pytest.raises(error, match=message):
        make()


CALLS = {
    "an array": ({"block_mask": np.ones((1, 1, 192, 192), bool)}, TypeError, "from_dense"),
    "the mask of flex": (
        {"block_mask": flex.create_block_mask(causal, None, None, 192, 192)},
        TypeError,
        "must be a flash_pallas.BlockMask, got flash_pallas.compat.flex.BlockMask: make",
    ),
    "other lengths": ({"block_mask": of_mod(1, 1, T, S)}, ValueError, "300 queries and 330 keys"),
    "other heads": (
        {"block_mask": of_mod(1, 3, 192, 192)},
        ValueError,
        "1 batch entries and 3 heads: there must be 1 or 2, and 1 or .* or ",
    ),
    "another batch": ({"block_mask": of_mod(3, 1, 192, 192)}, ValueError, "3 batch entries"),
    "a mask_mod and an offset": (
        {"block_mask": of_mod(1, 1, 192, 192), "q_offset": 5},
        ValueError,
        "q_offset is 5 and block_mask was made from a mask_mod",
    ),
    "a mask_mod and positions": (
        {"block_mask": of_mod(1, 1, 192, 192), "kv_positions": jnp.zeros((2, 192), jnp.int32)},
        ValueError,
        "kv_positions is an array and block_mask was made from a mask_mod",
    ),
    "tiles": (
        {"block_mask": of_index(INDEX), "backend": "xla", "blocks": {"block_q": 32}},
        ValueError,
        "tiles are the blocks of block_mask",
    ),
}


@pytest.mark.parametrize(("options", "error", "message"), CALLS.values(), ids=CALLS)
def test_calls_that_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        flash_attention(*inputs(2), causal=True, **options)


def test_an_offset_of_zero_is_none():
    q, k, v = inputs(2)
    mask = of_mod(1, 1, 192, 192)
    found = flash_attention(q, k, v, block_mask=mask, q_offset=np.int64(0))
    assert_close(found, flash_attention(q, k, v, causal=True))


# --- Attention ------------------------------------------------------------------------------------


def case(name, block_mask, **fields):
    return Case(name, **({"T": 200, "S": 260, "B": 2, "N": 4, "K": 2, "H": 8} | fields),
                block_mask=block_mask)  # fmt: skip


ATTENTION = (
    case("mask_mod", ("mask_mod", "1N", SMALL)),
    case("mask_mod causal", ("mask_mod", "BN", (128, 64)), causal=True, window=(150, None)),
    case("mask_mod and scores", ("mask_mod", "B1", SMALL), bias="1NTS", sinks=True, alibi="BN",
         softcap=3.0, score_mod="per_entry", deterministic=True),
    case("mask_mod and documents", ("mask_mod", "11", SMALL), segments="padded", T=260,
         poison=True),
    case("mask_mods", ("mask_mod", "1K", SMALL), mask_mod="prefix", max_logit=True),
    case("indices", ("indices", "BN", SMALL)),
    case("indices moved", ("indices", "BK", SMALL), causal=True, q_offset=(40, -3)),
    case("indices and window", ("indices", "1N", (64, 128)), window_arrays=((50, 100), (0, 20))),
    case("indices and positions", ("indices", "BN", SMALL), causal=True, q_positions="random",
         kv_positions="gaps", alibi="N"),
    case("indices and lengths", ("indices", "1K", SMALL), q_lengths=(200, 70), kv_lengths=(90, 260),
         causal=True, q_offset=60, poison=True, dropout_rate=0.3),
    case("indices and masks", ("indices", "B1", SMALL), mask="1NTS", mask_mod="stripes",
         bias="B1TS"),
    case("dense", ("dense", "BK", SMALL), empty_rows="mean"),
    case("dense and mask", ("dense", "1N", (192, 64)), mask="BN1S", segments="unsorted", T=260),
    case("dense and scores", ("dense", "BN", SMALL), score_mod="square", softcap=2.0, causal=True,
         q_offset=(60, 0), dropout_rate=0.5, broadcast_dropout=True, sinks=True),
    case("dense and rows", ("dense", "B1", SMALL), bias="BN1S", max_logit=True, empty_rows="mean"),
    case("bfloat16", ("indices", "BK", SMALL), dtype="bfloat16", causal=True, q_offset=60),
    case("one query", ("indices", "BN", SMALL), T=1, q_offset=259, causal=True),
)  # fmt: skip


@pytest.mark.thorough(always=["indices and window"])
@pytest.mark.parametrize("case", ATTENTION, ids=str)
def test_attention_and_all_gradients(case):
    checks.assert_matches_oracle(checks.bind("xla"), case)


def test_gradients_in_float64_are_right():
    with jax.enable_x64(True):
        q, k, v = (x.astype(jnp.float64) for x in inputs(1, length=128, heads=2, kv_heads=1))
        mask = from_indices(np.array([[0, 1], [1, -1]], np.int32)[None, None], 128)
        attend = partial(fp.flash_attention_with_lse, block_mask=mask, softcap=2.0)
        jax.test_util.check_grads(attend, (q, k, v), order=1, modes=["rev"])


@pytest.mark.thorough
def test_a_batch_of_several_dimensions():
    index = random_indices(6, 4)
    q, k, v = inputs(2, 3)
    found = value_and_gradients(partial(flash_attention, block_mask=from_indices(index)))(q, k, v)
    flat = [x.reshape(6, *x.shape[2:]) for x in (q, k, v)]
    right = value_and_gradients(lambda *x: oracle(*x, from_indices(index))[0])(*flat)
    assert_close(found, jax.tree.map(lambda x: x.reshape(2, 3, *x.shape[1:]), right))


def test_blocks_that_are_left_out_are_never_read():
    """Puts NaN into keys of which no block is in any list: a tile of them would show."""
    q, k, v = inputs(1)
    k, v = (x.at[:, 64:128].set(jnp.nan) for x in (k, v))
    mask = from_indices(np.array([[0], [2], [0]], np.int32)[None, None])
    assert jnp.isfinite(flash_attention(q, k, v, block_mask=mask)).all()


@pytest.mark.parametrize("empty_rows", ["zero", "mean"])
def test_queries_without_a_block(empty_rows):
    q, k, v = inputs(1)
    mask = from_indices(np.array([[0], [-1], [2]], np.int32)[None, None])
    options = {"block_mask": mask, "empty_rows": empty_rows}
    o, lse = fp.flash_attention_with_lse(q, k, v, **options)
    assert jnp.isneginf(lse[:, :, 64:128]).all() and jnp.isfinite(lse[:, :, :64]).all()
    mean = jnp.repeat(v.mean(1, keepdims=True), 2, axis=2)
    right = jnp.broadcast_to(mean if empty_rows == "mean" else 0.0 * mean, o[:, 64:128].shape)
    np.testing.assert_allclose(o[:, 64:128], right, rtol=1e-6, atol=1e-6)


def test_explain_takes_the_shapes_of_a_mask():
    x = jax.ShapeDtypeStruct((1, 192, 4, 64), jnp.bfloat16)
    mask = jax.eval_shape(from_indices, jax.ShapeDtypeStruct((1, 1, 3, 2), jnp.int32))
    found = explain_on("H100", fp.flash_attention, x, x, x, block_mask=mask)
    assert found.problem.spec.block_shape == SMALL and "block_lists" in found.problem.features
    assert found.reasons["cudnn"] == "takes no block_mask"
    assert fp.explain(
        fp.flash_attention, x, x, x, block_mask=mask, backend="xla"
    ).blocks == XlaBlocks(*SMALL)


@pytest.mark.parametrize("own", [{}, {"mask_mod": causal}, {"mask": np.ones((1, 1, 1, 1), bool)}])
def test_a_mask_of_the_call_leaves_no_block_whole(own):
    arguments = Arguments(block_mask=from_indices(random_indices(2, 2)), **own)
    lists = validate.canonicalize(*inputs(2), arguments).operands.block_lists
    assert lists.shape[:2] == (2, 4)  # of query heads
    np.testing.assert_array_equal(lists[..., 0], lists[..., 1] if own else 0)


# --- Transformations ------------------------------------------------------------------------------

attend = lambda q, k, v, block_mask: flash_attention(q, k, v, causal=True, block_mask=block_mask)
right = lambda q, k, v, block_mask: oracle(q, k, v, block_mask, causal=True)[0]


def test_another_mask_of_the_same_sizes_compiles_nothing():
    q, k, v = inputs(1, length=128)
    index, mod = (jax.jit(lambda *args: attend(*args)) for _ in range(2))
    made = module._lists_of_mod._cache_size()
    for seed in range(100):
        index(q, k, v, from_indices(random_indices(1, 1, 128, seed=seed), 128))
        first = jnp.int32(seed)
        mask_mod = lambda b, n, i, j, first=first: j >= first
        mod(q, k, v, BlockMask.from_mask_mod(mask_mod, 1, 1, 128, 128, block=SMALL))
    assert index._cache_size() == mod._cache_size() == 1
    assert module._lists_of_mod._cache_size() == made + 1


def test_a_mask_is_made_and_used_in_one_program():
    """Chooses blocks by the mean of their keys, as MoBA does."""

    def chosen(q, k, v):
        blocks = lambda x: x.reshape(*x.shape[:1], 3, 64, *x.shape[2:]).mean(2)
        scores = jnp.einsum("bqnh,bknh->bnqk", blocks(q), jnp.repeat(blocks(k), 2, axis=2))
        return from_indices(jax.lax.top_k(scores, 2)[1])

    args = inputs(2)
    found = jax.jit(value_and_gradients(lambda *x: attend(*x, chosen(*x))))(*args)
    assert_close(found, value_and_gradients(lambda *x: right(*x, chosen(*args)))(*args))


MAPPED = {
    "arrays": ((0, 0, 0, None), 0),
    "masks": ((None, None, None, 0), 3),
    "both": ((0, None, 0, 0), 3),
}


@pytest.mark.thorough(always=["both-2"])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("axes", MAPPED.values(), ids=MAPPED)
def test_vmap(axes, batch):
    in_axes, masks = axes
    full, one = inputs(3, 2), inputs(2)
    args = [a if axis == 0 else b for axis, a, b in zip(in_axes, full, one, strict=False)]
    stack = lambda seed: from_indices(random_indices(batch, 4, seed=seed))
    mask = stack(0)
    if masks:
        mask = jax.tree.map(lambda *x: jnp.stack(x), *map(stack, range(masks)))
    found, expected = (
        jax.vmap(value_and_gradients(f), in_axes)(*args, mask) for f in (attend, right)
    )
    assert_close(found, expected)


def test_masks_that_are_made_of_mapped_arrays():
    q, k, v = inputs(3, 1)
    prefix = jnp.array([10, 100, 150])

    def call(attend, q, k, v, prefix):
        mask_mod = lambda b, n, i, j: (j <= i - 20) | (j < prefix)
        mask = BlockMask.from_mask_mod(mask_mod, 1, 1, 192, 192, block=SMALL)
        return attend(q, k, v, mask)

    found, expected = (
        jax.vmap(value_and_gradients(partial(call, f)))(q, k, v, prefix) for f in (attend, right)
    )
    assert_close(found, expected)


def test_layers_of_a_scan_have_masks_of_their_own():
    q, k, v = inputs(1, kv_heads=4)
    masks = [from_indices(random_indices(1, 4, seed=seed)) for seed in range(3)]

    def layers(attend, q, k, v):
        layer = lambda x, mask: (x + attend(jnp.sin(x), k, v, mask), None)
        layer = jax.checkpoint(layer, policy=fp.save_attention)
        stacked = jax.tree.map(lambda *x: jnp.stack(x), *masks)
        return jax.lax.scan(layer, q, stacked)[0]

    found, expected = (value_and_gradients(partial(layers, f))(q, k, v) for f in (attend, right))
    assert_close(found, expected)


BOTH = P("data", None, "model")
OF_BATCH_AND_HEADS = {
    "own": (4, 4, P("data", "model")),
    "per KV head": (4, 2, P("data", "model")),
    "of heads": (1, 4, P(None, "model")),
    "shared": (1, 1, P()),
}


@pytest.mark.thorough(always=["per KV head-explicit"])
@pytest.mark.parametrize("types", TYPES.values(), ids=TYPES)
@pytest.mark.parametrize("of", OF_BATCH_AND_HEADS.values(), ids=OF_BATCH_AND_HEADS)
def test_shards_of_batch_and_heads(devices, of, types):
    batch, heads, spec = of
    mesh = mesh_of(devices, types, data=2, model=2)
    args = inputs(4, length=128), from_indices(random_indices(batch, heads, 128), 128)
    put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
    sharded = [put(x, BOTH) for x in args[0]], put(args[1], spec)
    call = jax.jit(lambda x, mask: value_and_gradients(attend)(*x, mask))
    assert_close(call(*sharded), call(*args))


@pytest.mark.thorough(always=["dense"])
@pytest.mark.parametrize("made_from", ["mask_mod", "dense", "indices"])
def test_other_masks_on_explicit_axes(devices, made_from):
    mesh = mesh_of(devices, TYPES["explicit"], data=2, model=2)
    put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
    x = inputs(4, length=128)

    def call(x, given):
        if made_from == "dense":
            mask = BlockMask.from_dense(given, block=SMALL)
        elif made_from == "indices":
            mask = from_indices(given, 128)
        else:
            mod = lambda b, n, i, j: j < given[b, n] + i
            mask = BlockMask.from_mask_mod(mod, 4, 4, 128, 128, block=SMALL)
        return value_and_gradients(attend)(*x, mask)

    given = {
        "mask_mod": jnp.arange(16).reshape(4, 4),
        "dense": draw(4, 4, 128, 128) < 0.5,
        "indices": jnp.asarray(random_indices(4, 4, 128)),
    }[made_from]
    sharded = [put(y, BOTH) for y in x], put(given, P("data", "model"))
    assert_close(jax.jit(call)(*sharded), jax.jit(call)(x, given))


@pytest.mark.parametrize("argument", ["mask_mod", "block_mask"])
def test_a_mask_mod_captures_a_shard(devices, argument):
    mesh = mesh_of(devices, TYPES["auto"], data=2, model=2)

    def call(q, k, v, widths):
        batch, _, heads, _ = q.shape
        seen = lambda b, n, i, j: i - j < widths[b, n]
        made = lambda: BlockMask.from_mask_mod(seen, batch, heads, 128, 128, block=SMALL)
        return flash_attention(q, k, v, **{argument: seen if argument == "mask_mod" else made()})

    args = *inputs(4, length=128), jnp.arange(16).reshape(4, 4) * 10
    specs = (BOTH,) * 3 + (P("data", "model"),)
    local = jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=BOTH)
    assert_close(jax.jit(local)(*args), jax.jit(call)(*args))


@pytest.mark.thorough
def test_shard_map(devices):
    mesh = mesh_of(devices, TYPES["auto"], data=2, model=2)
    args = *inputs(4, length=128), from_indices(random_indices(4, 4, 128), 128)
    specs = (BOTH,) * 3 + (P("data", "model"),)
    local = jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=BOTH)
    assert_close(jax.jit(value_and_gradients(local))(*args), value_and_gradients(attend)(*args))


def test_memory_of_a_gradient_is_linear_in_the_length():
    def temporary(length):
        x = jax.ShapeDtypeStruct((1, length, 2, 64), jnp.bfloat16)
        index = jax.ShapeDtypeStruct((1, 1, length // 128, 8), jnp.int32)

        def loss(x, index):
            mask = BlockMask.from_indices(index, q_len=length, kv_len=length)
            o = flash_attention(x, x, x, causal=True, block_mask=mask, backend="xla")
            return o.astype(jnp.float32).sum()

        compiled = jax.jit(jax.grad(loss)).lower(x, index).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    length = 1 << 16
    assert temporary(length) < 40 * length * 2 * 64 * 2


@pytest.mark.thorough(always=["prefix", "documents"])
@pytest.mark.parametrize("recipe", block_masks.RECIPES)
def test_every_recipe_on_xla(recipe):
    case = Case(recipe, T=260, S=300, B=2, N=4, K=2, H=16, block_mask=recipe)
    checks.assert_matches_oracle(checks.bind("xla"), case)


# --- What a notebook shows ------------------------------------------------------------------------


def test_its_text_and_its_picture():
    mask = BlockMask.from_mask_mod(lambda b, n, i, j: (j <= i) & (i < 256), 1, 1, 384, 256)
    text = (
        "BlockMask of 384 queries and 256 keys, made from mask_mod: blocks of 128 queries and 128 "
        "keys, batch 1, heads 1"
    )
    assert repr(mask) == str(mask) == f"{text}, 50.0% of the blocks empty"
    html = mask._repr_html_()
    assert mask.plot() in html and "50.0%" in html
    seen = []
    jax.jit(lambda mask: seen.extend([repr(mask), mask._repr_html_()]))(mask)
    shapes = jax.eval_shape(lambda: mask)
    assert [*seen, repr(shapes)] == [text, f"<p>{text}</p>", text]
