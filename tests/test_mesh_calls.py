"""Every public function on sharded arrays, on meshes of both kinds of axes, against one device.

On Explicit axes types say how arrays are sharded, and JAX refuses what leaves it a choice: in eager
calls, under jit, and in their transposes. A public function without a case here fails
`test_every_public_function_has_a_case`.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import flash_pallas as fp
from flash_pallas import compat, nn, parallel
from flash_pallas.nn import linen
from flash_pallas.nn import nnx as fp_nnx

from .test_meshes import BOTH, ROWS, assert_close, put
from .test_sharding import TYPES, draw, mesh_of

WHOLE = P()
T = 130  # of the block masks: two blocks of queries, the last of them short


class Call(NamedTuple):
    """A function, its arrays and their specs; the first `learned` of them have a gradient."""

    run: Callable
    arrays: tuple
    specs: tuple
    learned: int = 0


def ints(*values):
    return np.array(values, np.int32)


def qkv(length=9, keys=12, heads=4, kv_heads=2):
    shapes = (4, length, heads, 8), (4, keys, kv_heads, 8), (4, keys, kv_heads, 8)
    return tuple(draw(*shape, seed=seed) for seed, shape in enumerate(shapes))


def attention(function, *more, specs=(), learned=3, heads=4, kv_heads=2, **options):
    """Returns the call of a function of q, k, v and of these further arrays."""
    arrays = *qkv(heads=heads, kv_heads=kv_heads), *more
    return Call(partial(function, **options), arrays, ((BOTH,) * 3 + specs), learned)


def transposed(function, kv_heads=4):
    """Returns the call of a function with heads in front of lengths."""
    arrays = tuple(jnp.swapaxes(x, 1, 2) for x in qkv(9, 9, kv_heads=kv_heads))
    return Call(function, arrays, (P("data", "model"),) * 3, 3)


# --- attention ------------------------------------------------------------------------------------


def with_everything(q, k, v, bias, sinks, slopes, lengths, ids):
    return fp.flash_attention(
        q,
        k,
        v,
        bias=bias,
        sinks=sinks,
        alibi_slopes=slopes,
        kv_lengths=lengths,
        q_segment_ids=ids[:, :9],
        kv_segment_ids=ids,
        dropout_rate=0.3,
        dropout_seed=3,
        causal=True,
        window=7,
    )


def saved(q, k, v):
    attend = partial(fp.flash_attention, causal=True)
    return jax.checkpoint(attend, policy=fp.save_attention)(q, k, v)


def tangents(*qkv):
    attend = partial(fp.flash_attention, differentiable="any", causal=True)
    return jax.jvp(attend, qkv, tuple(map(jnp.sin, qkv)))


def packed(q, k, v, lengths):
    return fp.flash_attention_varlen(q, k, v, cu_seqlens_q=lengths, causal=True)


def told(function, *args, **options):
    """Explains a call, which gives no arrays to compare."""
    assert fp.explain(function, *args, **options).backend
    return jnp.zeros(())


IDS = np.sort(np.random.default_rng(3).integers(0, 2, (4, 12))).astype(np.int32)
TOKENS = tuple(draw(12, n, 8, seed=seed) for seed, n in enumerate((4, 2, 2)))
OF_TOKENS = (P(None, "model"),) * 3
DOCUMENTS = ints(0, 5, 12)
SIDES = draw(1, 4, 1, 12, seed=4), draw(4, seed=5), draw(4, seed=6), ints(12, 1, 5, 7), IDS
OF_SIDES = P(None, "model"), P("model"), WHOLE, ROWS, ROWS

CALLS: dict[str, Call] = {
    "flash_attention": attention(with_everything, *SIDES, specs=OF_SIDES, learned=6),
    "flash_attention tangents": attention(tangents),
    "flash_attention_with_lse": attention(fp.flash_attention_with_lse, causal=True),
    "flash_attention_with_max_logit": attention(
        lambda *x: fp.flash_attention_with_max_logit(*x, causal=True)[0]
    ),
    "dot_product_attention": attention(
        lambda q, k, v, bias, mask, lengths: fp.dot_product_attention(
            q, k, v, bias, mask, key_value_seq_lengths=lengths
        ),
        draw(1, 4, 9, 12, seed=4),
        np.asarray(draw(4, 1, 9, 12, seed=5)) > -1,
        ints(12, 1, 5, 7),
        specs=(P(None, "model"), ROWS, ROWS),
        learned=4,
    ),
    "save_attention": attention(saved),
    "flash_attention_varlen": Call(packed, (*TOKENS, DOCUMENTS), (*OF_TOKENS, WHOLE), 3),
    "explain": attention(partial(told, fp.flash_attention), learned=0),
    "explain varlen": Call(
        lambda *x: told(fp.flash_attention_varlen, *x[:3], cu_seqlens_q=x[3]),
        (*TOKENS, DOCUMENTS),
        (*OF_TOKENS, WHOLE),
    ),
    "apply_rope": Call(
        lambda x, positions: fp.apply_rope(x, positions, 1e4),
        (draw(4, 9, 4, 8), np.tile(np.arange(9, dtype=np.int32), (4, 1))),
        (BOTH, ROWS),
        1,
    ),
}

# --- block masks ----------------------------------------------------------------------------------

INDICES = ints([[0, -1], [1, 0]])[None].repeat(4, 0).repeat(4, 1).reshape(4, 4, 2, 2)
DENSE = np.random.default_rng(7).random((4, 4, T, T)) > 0.5
SIZES = {"q_len": T, "kv_len": T}


def masked(mask: Callable, *arrays, specs) -> Call:
    """Returns attention under what `mask` makes of arrays."""
    q = draw(4, T, 4, 8)
    attend = lambda q, *x: fp.flash_attention(q, q, q, block_mask=mask(*x))
    return Call(attend, (q, *arrays), (BOTH, *specs), 1)


def of_mod(first):
    mod = lambda b, n, i, j: (j <= i) & (j >= first[b, n])
    return fp.BlockMask.from_mask_mod(mod, 4, 4, T, T)


def both_kinds(index, dense):
    listed = fp.BlockMask.from_indices(index, **SIZES)
    return listed & fp.BlockMask.from_dense(dense)


def either(dense, other):
    return fp.BlockMask.from_dense(dense) | fp.BlockMask.from_dense(other)


CUT = P("data", "model")
FIRST = np.arange(16, dtype=np.int32).reshape(4, 4) * 5
CALLS |= {
    "BlockMask.from_indices": masked(
        partial(fp.BlockMask.from_indices, **SIZES),
        INDICES,
        ints(2, 1)[None, None].repeat(4, 0).repeat(4, 1),
        specs=(CUT, CUT),
    ),
    "BlockMask.from_dense": masked(fp.BlockMask.from_dense, DENSE, specs=(CUT,)),
    "BlockMask.from_mask_mod": masked(of_mod, FIRST, specs=(CUT,)),
    "BlockMask.__and__": masked(both_kinds, INDICES[:, :1], DENSE, specs=(ROWS, CUT)),
    "BlockMask.__or__": masked(either, DENSE, ~DENSE[:1], specs=(CUT, P(None, "model"))),
    "BlockMask.to_dense": Call(
        lambda index, dense, first: (both_kinds(index, dense) & of_mod(first)).to_dense(),
        (INDICES, DENSE, FIRST),
        (ROWS, P(None, "model"), CUT),
    ),
}

# --- caches ---------------------------------------------------------------------------------------

PAGES = tuple(draw(8, 16, 2, 8, seed=seed) for seed in (0, 1))
TABLE = ints([3, 0], [5, 1], [2, 7], [6, 4]).reshape(4, 2)
NEW = tuple(draw(4, 1, 2, 8, seed=seed) for seed in (2, 3))
OF_PAGES = (P(None, None, "model"),) * 2
PLACES = {"kv_lengths": ints(4, 30, 9, 17), "page_table": TABLE, "cu_q_lens": ints(0, 4, 6, 9, 12)}


def appended(k, v, lengths, *new):
    return fp.append_kv(fp.KVCache(k, v, lengths), *new)


def decoded(q, k, v, lengths):
    return fp.flash_decode(q, k, v, kv_lengths=lengths)


def ragged(function, *arrays):
    lengths, table, counts = arrays[-3:]
    places = {"kv_lengths": lengths, "page_table": table, "cu_q_lens": counts}
    return function(*arrays[:-3], **places)


def ragged_call(function, *arrays, specs) -> Call:
    run = partial(ragged, function)
    return Call(run, (*arrays, *PLACES.values()), (*specs, WHOLE, WHOLE, WHOLE))


CACHE = (*(draw(4, 32, 2, 8, seed=seed) for seed in (0, 1)), ints(0, 9, 3, 31))
OF_CACHE = BOTH, BOTH, ROWS
CALLS |= {
    "KVCache": Call(
        lambda x: fp.KVCache.empty(4, 8, 2, 8, x.dtype)._replace(lengths=x[:, 0]),
        (draw(4, 2),),
        (ROWS,),
    ),
    "append_kv": Call(appended, (*CACHE, *NEW), (*OF_CACHE, BOTH, BOTH)),
    "flash_decode": Call(decoded, (draw(4, 1, 4, 8), *CACHE), (BOTH, *OF_CACHE)),
    "explain decode": Call(
        lambda q, k, v: told(fp.flash_decode, q, k, v, kv_lengths=3),
        (draw(4, 1, 4, 8), *CACHE[:2]),
        (BOTH, BOTH, BOTH),
    ),
    "gather_pages": Call(fp.gather_pages, (PAGES[0], TABLE), (OF_PAGES[0], ROWS)),
    "append_ragged_kv": ragged_call(
        lambda k, v, *new, **places: fp.append_ragged_kv((k, v), *new, **places),
        *PAGES,
        *TOKENS[1:],
        specs=(*OF_PAGES, *OF_TOKENS[1:]),
    ),
    "ragged_paged_attention": ragged_call(
        lambda q, *x, **places: fp.ragged_paged_attention(
            q, *x[:2], new_k=x[2], new_v=x[3], **places
        ),
        TOKENS[0],
        *PAGES,
        *TOKENS[1:],
        specs=(OF_TOKENS[0], *OF_PAGES, *OF_TOKENS[1:]),
    ),
    "explain ragged": ragged_call(
        partial(told, fp.ragged_paged_attention), TOKENS[0], *PAGES, specs=(OF_TOKENS[0], *OF_PAGES)
    ),
}

# --- parallel -------------------------------------------------------------------------------------


def context(strategy, mesh, q, k, v):
    how = {"mesh": mesh, "axis": "model", "batch_axis": "data", "strategy": strategy}
    return parallel.context_parallel_attention(q, k, v, causal=True, **how)


def inside(mesh, q, k, v):
    local = partial(parallel.sharded_attention, axis="model", shard_axes=("data", None))
    rows = P("data", "model")
    return jax.shard_map(local, mesh=mesh, in_specs=(rows,) * 3, out_specs=rows)(q, k, v)


def in_a_layer(mesh, x):
    how = parallel.ContextParallel("model", batch_axis="data", mesh=mesh)
    layer = fp_nnx.FlashAttention(4, 32, causal=True, context_parallel=how, rngs=nnx.Rngs(0))
    return layer(x)


UNEVEN, EVEN = qkv(9, 9, kv_heads=4), qkv(12, 12, kv_heads=4)
# Functions of the mesh as well.
ON_MESH = {
    **{
        f"parallel.context_parallel_attention {strategy}": Call(
            partial(context, strategy), UNEVEN, (ROWS,) * 3, 3
        )
        for strategy in ("ring", "all_gather", "ulysses")
    },
    "parallel.sharded_attention": Call(inside, EVEN, (P("data", "model"),) * 3, 3),
    "parallel.ContextParallel": Call(in_a_layer, (draw(4, 12, 32),), (P("data", "model"),), 1),
}
CALLS |= {
    "parallel.to_zigzag": Call(
        lambda x: parallel.to_zigzag(x, 2), (draw(4, 12, 4, 8),), (P("data", "model"),), 1
    ),
    "parallel.from_zigzag": Call(
        lambda x: parallel.from_zigzag(x, 2), (draw(4, 12, 4, 8),), (P("data", "model"),), 1
    ),
}

# --- layers ---------------------------------------------------------------------------------------


def nnx_layer(x):
    layer = fp_nnx.FlashAttention(
        4, 32, num_kv_heads=2, causal=True, rope_theta=1e4, rngs=nnx.Rngs(0)
    )
    return layer(x)


def linen_layer(x):
    layer = linen.FlashAttention(num_heads=4, num_kv_heads=2, causal=True, rope_theta=1e4)
    return layer.apply(layer.init(jax.random.key(0), np.zeros((1, 2, 32), np.float32)), x)


def with_a_cache(make, x, k, v, lengths):
    layer = fp_nnx.FlashAttention(4, 32, num_kv_heads=2, causal=True, rngs=nnx.Rngs(0), window=7)
    return layer(x, cache=make(k, v, lengths))


STEP = (draw(4, 1, 32), *(draw(4, 8, 2, 8, seed=seed) for seed in (0, 1)), ints(0, 7, 3, 5))
SCALES = (np.full((2,), 0.02, np.float32),) * 2
CALLS |= {
    "nn.attention_fn": attention(nn.attention_fn, heads=4, kv_heads=4),
    "nn.causal_attention_fn": Call(nn.causal_attention_fn, qkv(9, 9, kv_heads=4), (BOTH,) * 3, 3),
    "nn.segment_positions": Call(nn.segment_positions, (IDS,), (ROWS,)),
    "nn.nnx.FlashAttention": Call(nnx_layer, (draw(4, 9, 32),), (ROWS,), 1),
    "nn.linen.FlashAttention": Call(linen_layer, (draw(4, 9, 32),), (ROWS,), 1),
    "nn.RingCache": Call(partial(with_a_cache, nn.RingCache), STEP, (ROWS, *OF_CACHE)),
    "nn.ScaledCache": Call(
        partial(
            with_a_cache,
            lambda k, v, lengths: nn.ScaledCache(
                jnp.round(k).astype(jnp.int8), jnp.round(v).astype(jnp.int8), lengths, *SCALES
            ),
        ),
        STEP,
        (ROWS, *OF_CACHE),
    ),
}

# --- functions of other libraries -----------------------------------------------------------------

flash_attn, sdpa = compat.flash_attn, compat.torch_sdpa


def flexed(q, k, v, slopes):
    mask = compat.flex.create_block_mask(lambda b, h, i, j: (i - j) % 3 != 2, None, None, 9, 9)
    bent = lambda score, b, h, i, j: score + slopes[h] * jnp.where(i > j, 1.0, 0.5)
    return compat.flex.flex_attention(q, k, v, bent, mask)


def splashed(q, k, v):
    splash = compat.splash
    mask = splash.MultiHeadMask([splash.CausalMask((9, 9)) for _ in range(4)])
    kernel = splash.make_splash_mha(mask, head_shards=1, q_seq_shards=1)
    return jax.vmap(kernel)(q, k, v)


def splashed_mqa(q, k, v):
    splash = compat.splash
    mask = splash.MultiHeadMask([splash.CausalMask((9, 9)) for _ in range(4)])
    return jax.vmap(splash.make_splash_mqa(mask, head_shards=1, q_seq_shards=1))(q, k, v)


CALLS |= {
    "compat.flash_attn.flash_attn_func": attention(
        lambda *x: flash_attn.flash_attn_func(*x, causal=True)
    ),
    "compat.flash_attn.flash_attn_qkvpacked_func": Call(
        flash_attn.flash_attn_qkvpacked_func,
        (draw(4, 9, 3, 4, 8),),
        (P("data", None, None, "model"),),
        1,
    ),
    "compat.flash_attn.flash_attn_kvpacked_func": Call(
        flash_attn.flash_attn_kvpacked_func,
        (draw(4, 9, 4, 8), draw(4, 12, 2, 2, 8)),
        (BOTH, P("data", None, None, "model")),
        2,
    ),
    "compat.flash_attn.flash_attn_varlen_func": Call(
        lambda q, k, v, at: flash_attn.flash_attn_varlen_func(q, k, v, at, at, 12, 12),
        (*TOKENS, DOCUMENTS),
        (*OF_TOKENS, WHOLE),
        3,
    ),
    "compat.flash_attn.flash_attn_with_kvcache": Call(
        lambda q, k, v, lengths, *new: flash_attn.flash_attn_with_kvcache(
            q, k, v, *new, cache_seqlens=lengths
        ),
        (draw(4, 1, 4, 8), *CACHE, *NEW),
        (BOTH, *OF_CACHE, BOTH, BOTH),
    ),
    "compat.flex.flex_attention": transposed(flexed)._replace(
        arrays=(*(jnp.swapaxes(x, 1, 2) for x in UNEVEN), draw(4)),
        specs=(*(P("data", "model"),) * 3, P("model")),
        learned=4,
    ),
    "compat.splash.make_splash_mha": transposed(splashed),
    "compat.splash.make_splash_mqa": transposed(splashed_mqa)._replace(
        arrays=(draw(4, 4, 9, 8), draw(4, 9, 8, seed=1), draw(4, 9, 8, seed=2)),
        specs=(P("data", "model"), ROWS, ROWS),
    ),
    "compat.torch_sdpa.scaled_dot_product_attention": transposed(
        lambda q, k, v: sdpa.scaled_dot_product_attention(q, k, v, is_causal=True)
    ),
    "compat.ragged_paged_attention.ragged_paged_attention": Call(
        lambda q, pages, lengths, table, counts: (
            compat.ragged_paged_attention.ragged_paged_attention(
                q, pages, lengths, table, counts, ints(4)
            )
        ),
        (TOKENS[0], draw(8, 16, 4, 8), *PLACES.values()),
        (OF_TOKENS[0], OF_PAGES[0], WHOLE, WHOLE, WHOLE),
    ),
}


# --- the tests ------------------------------------------------------------------------------------

# No arrays of a program go in, or no kernels run without a GPU.
EXEMPT = {
    "Explanation",
    "Tuning",
    "UnsupportedByBackend",
    "autotune",
    "check_pages",
    "target",
    "nn.alibi_slopes",
    "parallel.zigzag_positions",
    "compat.flex.noop_mask",
    "compat.flex.and_masks",
    "compat.flex.or_masks",
    "compat.flex.create_mask",
    "compat.flex.create_block_mask",
    "compat.splash.make_splash_mha_single_device",  # the same function
    "compat.splash.make_splash_mqa_single_device",
    "compat.torch_sdpa.causal_upper_left",
    "compat.torch_sdpa.causal_lower_right",
}


def public_functions() -> set[str]:
    """Returns the names of all, with their module; of a BlockMask its methods of whole arrays."""
    found = {*fp.__all__, "nn.linen.FlashAttention", "nn.nnx.FlashAttention"} - {"BlockMask"}
    found |= {f"parallel.{n}" for n in parallel.__all__} | {f"nn.{n}" for n in nn.__all__}
    of_tests = {"plot", "check"}  # numbers of a picture, and shapes
    methods = {n for n, x in vars(fp.BlockMask).items() if inspect.isroutine(x)} - of_tests
    joins = {"__and__", "__or__"}
    found |= {f"BlockMask.{n}" for n in methods if n in joins or not n.startswith("_")}
    for name in compat.__all__:
        module = importlib.import_module(f"flash_pallas.compat.{name}")
        own = inspect.getmembers(module, inspect.isfunction)
        own = [n for n, f in own if f.__module__ == module.__name__ and not n.startswith("_")]
        found |= {f"compat.{name}.{n}" for n in own}
    return found


def test_every_public_function_has_a_case():
    called = {name.partition(" ")[0] for name in {**CALLS, **ON_MESH}}
    assert public_functions() - EXEMPT == called


def outcome(call: Call, run, args):
    """Returns results, and gradients where there are any, of a loss that is not constant."""
    if not call.learned:
        return run(*args)

    def loss(*learned):
        found = run(*learned, *args[call.learned :])
        sums = [jnp.sum(jnp.sin(jnp.nan_to_num(x, neginf=0.0))) for x in jax.tree.leaves(found)]
        return sum(sums), found

    grad = jax.value_and_grad(loss, tuple(range(call.learned)), has_aux=True)
    (_, found), grads = grad(*args[: call.learned])
    return found, grads


def compare(call: Call, run, expected_of, mesh, jitted: bool):
    whole = tuple(map(jnp.asarray, call.arrays))
    expected = jax.jit(partial(outcome, call, expected_of))(whole)
    with jax.set_mesh(mesh):
        sharded = tuple(map(partial(put, mesh), call.arrays, call.specs))
        wanted = partial(outcome, call, run)
        found = (jax.jit(wanted) if jitted else wanted)(sharded)
        found = jax.tree.map(np.asarray, found)
    assert_close(found, expected)


NAMED = {**CALLS, **ON_MESH}


ALWAYS = ("dot_product_attention", "BlockMask.from_indices")


@pytest.mark.thorough(always=[f"{name}-explicit-eager" for name in ALWAYS])
@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("types", TYPES.values(), ids=TYPES)
@pytest.mark.parametrize("name", NAMED)
def test_sharded_arrays_give_what_whole_ones_do(devices, name, types, jitted):
    call, mesh = NAMED[name], mesh_of(devices, types, data=2, model=2)
    run, alone = call.run, call.run
    if name in ON_MESH:
        single = mesh_of(devices[:1], TYPES["auto"], data=1, model=1)
        run, alone = partial(run, mesh), partial(run, single)
    compare(call, run, alone, mesh, jitted)
