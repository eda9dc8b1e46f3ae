"""flash_decode with kv_blocks: every backend, every kind of cache, and what is refused."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import flash_pallas as fp
from flash_pallas.backends.hopper import HopperBackend
from flash_pallas.backends.portable import PortableBackend
from flash_pallas.core import decode, kv_blocks, softmax
from flash_pallas.frontend import validate_decode

from .checks import explain_on
from .chosen_blocks import CASES, Chosen, assert_right
from .interpreter import race_checked

INTERPRETED = {
    "hopper": HopperBackend(interpret=True, num_sms=2),
    "portable": PortableBackend(interpret=True, capability="8.0", num_sms=2),
}


def on_xla(q, k, v, arguments):
    return fp.flash_decode(q, k, v, **arguments, backend="xla", return_lse=True)


@pytest.mark.thorough(always=["contiguous", "int8_pages", "shared"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_xla(case):
    assert_right(case, on_xla)


COMBINATIONS = [
    pytest.param(name, case, id=f"{name}-{case}")
    for name in INTERPRETED
    for case in CASES
    if case.dtype != "float32" and (name == "hopper" or case.cache is None)
]


@pytest.mark.thorough(always=["portable-small_blocks_128"])
@pytest.mark.interpret
@pytest.mark.parametrize(("name", "case"), COMBINATIONS)
def test_kernels(name, case):
    backend = INTERPRETED[name]

    def attend(q, k, v, arguments):
        arguments = validate_decode.DecodeArguments(**arguments)
        spec, operands = validate_decode.canonicalize(q, k, v, arguments)
        spec, operands = kv_blocks.as_pages(spec, operands)
        problem = decode.describe(operands, spec)
        assert backend.decode.refusal(problem) is None
        blocks = backend.decode.plan(problem)
        found = jax.jit(lambda x: backend.decode.run(spec, blocks, x))(operands)
        return found.o, softmax.natural(found.lse_log2)

    with race_checked():
        assert_right(case, attend)


def test_all_blocks_are_all_keys():
    (q, k, v), arguments, *_ = Chosen("all").draw()
    k, v = (jnp.nan_to_num(x) for x in (k, v))
    given = arguments | {"kv_blocks": np.tile(np.arange(5, dtype=np.int32)[::-1], (5, 1, 1))}
    found = fp.flash_decode(q, k, v, **given, return_lse=True)
    plain = fp.flash_decode(q, k, v, kv_lengths=arguments["kv_lengths"], return_lse=True)
    for a, b in zip(found, plain, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


def test_another_choice_compiles_nothing():
    (q, k, v), arguments, *_ = Chosen("twice").draw()
    fixed = {"kv_block_size": arguments.pop("kv_block_size")}
    step = jax.jit(lambda q, arrays: fp.flash_decode(q, k, v, **arrays, **fixed))
    first = step(q, arguments)
    other = step(q, arguments | {"kv_blocks": arguments["kv_blocks"][::-1].copy()})
    assert step._cache_size() == 1 and not np.allclose(first, other)


@pytest.mark.parametrize("page", [None, 64])
def test_vmap(page):
    case = Chosen("mapped", page=page)
    (q, k, v), arguments, *_ = case.draw()
    size = arguments.pop("kv_block_size")
    stack = lambda x: jnp.stack([x, x[::-1]])
    mapped = {name: stack(arguments.pop(name)) for name in ("kv_blocks", "kv_lengths")}

    def step(q, k, arrays):
        return fp.flash_decode(q, k, v, **arrays, **arguments, kv_block_size=size)

    q, k = stack(q), jnp.stack([k, 0.5 * k])
    found = jax.vmap(step)(q, k, mapped)
    for i in range(2):
        one = step(q[i], k[i], jax.tree.map(lambda x, i=i: x[i], mapped))
        np.testing.assert_allclose(found[i], one, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("types", [AxisType.Auto, AxisType.Explicit])
def test_sequences_and_heads_over_devices(heads, types):
    """Cuts a contiguous cache over both axes of a mesh, with lists for all heads or for each."""
    case = Chosen("sharded", lengths=(300, 257, 64, 190), heads=heads, N=8, K=4)
    (q, k, v), arguments, *_ = case.draw()
    size = arguments.pop("kv_block_size")
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(types,) * 2)
    place = lambda x, *axes: jax.device_put(x, NamedSharding(mesh, P(*axes)))
    of_heads = ("data", "model") if heads > 1 else ("data",)
    rows = "data", None, "model"
    sharded = [place(x, *rows) for x in (q, k, v)]
    arrays = {
        "kv_blocks": place(arguments["kv_blocks"], *of_heads),
        "kv_lengths": place(arguments["kv_lengths"].astype(np.int32), "data"),
    }
    step = jax.jit(lambda q, k, v, arrays: fp.flash_decode(q, k, v, **arrays, kv_block_size=size))
    with jax.set_mesh(mesh):
        found = step(*sharded, arrays)
        text = step.lower(*sharded, arrays).compile().as_text()
    if types is AxisType.Explicit:  # otherwise XLA cuts what backend xla computes
        assert "all-gather" not in text and "all-to-all" not in text
    expected = fp.flash_decode(q, k, v, **arguments, kv_block_size=size)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_nothing_of_the_cache_is_copied():
    shapes = jax.ShapeDtypeStruct((2, 65536, 2, 64), jnp.float32)
    q = jax.ShapeDtypeStruct((2, 1, 4, 64), jnp.float32)
    index = jax.ShapeDtypeStruct((2, 2, 16), jnp.int32)
    step = lambda q, k, v, i: fp.flash_decode(q, k, v, kv_blocks=i, kv_block_size=64)
    plan = jax.jit(step).lower(q, shapes, shapes, index).compile().memory_analysis()
    assert plan.temp_size_in_bytes < shapes.size * 4 / 8


def test_explain_counts_the_keys_that_are_chosen():
    q, k = jnp.ones((1, 1, 8, 64)), jnp.ones((1, 4096, 2, 64))
    index = jnp.zeros((1, 2, 8), jnp.int32)
    found = fp.explain(fp.flash_decode, q, k, k, kv_blocks=index, kv_block_size=64, backend="xla")
    assert found.blocks.block_kv == 512
    shape = jax.ShapeDtypeStruct(index.shape, index.dtype)
    half = jax.ShapeDtypeStruct(q.shape, "bfloat16"), jax.ShapeDtypeStruct(k.shape, "bfloat16")
    said = explain_on(
        "H100", fp.flash_decode, half[0], *half[1:] * 2, kv_blocks=shape, kv_block_size=64
    )
    assert "k [64, 64, 2, 64]" in str(said) and "runs on: hopper" in str(said)


Q, K = jnp.ones((2, 1, 4, 16)), jnp.ones((2, 128, 2, 16))
PAGES = {"page_table": jnp.zeros((2, 3), jnp.int32), "kv_lengths": jnp.array([3, 96])}
INDEX = jnp.zeros((2, 2, 3), jnp.int32)
BAD = {
    "dtype": ({"kv_blocks": INDEX.astype("float32")}, TypeError, "kv_blocks has dtype float32"),
    "rank": ({"kv_blocks": INDEX[0]}, ValueError, r"kv_blocks has shape \(2, 3\).*\[batch, heads,"),
    "heads": ({"kv_blocks": jnp.zeros((2, 4, 3), jnp.int32)}, ValueError, "one row for all KV hea"),
    "no block": ({"kv_blocks": INDEX[..., :0]}, ValueError, "at least one block"),
    "no size": ({"kv_block_size": None}, TypeError, "kv_block_size is None: it must be an int"),
    "size": ({"kv_block_size": 48}, ValueError, "kv_block_size is 48.* divide the 128 keys"),
    "small": ({"kv_block_size": 8}, ValueError, "kv_block_size is 8.*multiple of 16 from 16 to"),
    "bool": ({"kv_block_size": True}, TypeError, "kv_block_size is True: it must be an int"),
    "alone": ({"kv_blocks": None}, ValueError, "kv_block_size is 64 and kv_blocks is None"),
    "window": ({"window": 9}, ValueError, "kv_blocks is given and so is window"),
    "starts": ({"kv_starts": 9}, ValueError, "kv_blocks is given and so is kv_starts"),
    "slopes": ({"alibi_slopes": jnp.ones(4)}, ValueError, "and so is alibi_slopes"),
    "offset": ({"q_offset": 9}, ValueError, "and so is q_offset"),
    "tokens": ({"q": jnp.ones((2, 2, 4, 16))}, ValueError, "q has 2 tokens: it must be 1"),
    "pages": (
        {"k": jnp.ones((5, 32, 2, 16)), "kv_block_size": 48} | PAGES,
        ValueError,
        "kv_block_size is 48: it must be a multiple of the page size, 32",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name):
    options, error, message = BAD[name]
    given = {"q": Q, "k": K, "kv_blocks": INDEX, "kv_block_size": 64} | options
    q, k = given.pop("q"), given.pop("k")
    with pytest.raises(error, match=message):
        fp.flash_decode(q, k, k, **given)


@pytest.mark.thorough(always=["0", "1"])
@pytest.mark.parametrize("seed", range(8))
def test_random_choices(seed):
    rng = np.random.default_rng(seed)
    one = lambda *values: values[rng.integers(len(values))]
    kv_heads, block, page = one(1, 2, 3), one(16, 48, 64), one(None, 16)
    room = block * int(rng.integers(1, 9))
    case = Chosen(
        "drawn",
        lengths=(room, *(min(room, int(x)) for x in rng.integers(0, room + 9, 3))),
        block=block,
        heads=one(1, kv_heads),
        page=page,
        N=kv_heads * one(1, 2, 5),
        K=kv_heads,
        H=one(8, 40, 64),
        S=room,
        options=(("num_splits", one(1, 2, 5)), ("softcap", one(None, 2.0))),
    )
    assert_right(case, on_xla)
