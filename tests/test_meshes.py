"""Calls on meshes of real programs; test_sharding.py has attention of whole sharded arrays.

Everything is compared with the same call on one device: outputs, gradients, and how they are cut.
"""

from __future__ import annotations

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import flash_pallas as fp
from flash_pallas.backends.hopper import HopperBackend
from flash_pallas.backends.hopper.backward.fused import launches
from flash_pallas.core import mesh_axes
from flash_pallas.frontend import validate
from flash_pallas.frontend.arguments import Arguments
from flash_pallas.nn import RingCache, ScaledCache
from flash_pallas.nn import nnx as fp_nnx
from flash_pallas.parallel import context_parallel_attention, from_zigzag, to_zigzag
from flash_pallas.transforms import derivatives

from .test_sharding import ATOL, TYPES, draw, mesh_of, moved

ROWS, HEADS = P("data"), P(None, None, "model")
BOTH = P("data", None, "model")


def put(mesh, x, spec):
    return jax.device_put(x, NamedSharding(mesh, spec))


def assert_close(found, expected):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, **ATOL)


def assert_same_types(found, like):
    """Compares explicit types of arrays, which a loop carries, for example."""
    assert jax.tree.map(jax.typeof, found) == jax.tree.map(jax.typeof, like)


def gradient(attend):
    """Returns a call's (output, gradients of all arguments); the cotangent is not constant."""

    def loss(*args):
        o = attend(*args)
        return jnp.sum(jnp.sin(o)), o

    def run(*args):
        (_, o), grads = jax.value_and_grad(loss, tuple(range(len(args))), has_aux=True)(*args)
        return o, grads

    return run


decay = np.linspace(0.5, 2.0, 4, dtype=np.float32)
MODS = {
    "a constant factor": {"score_mod": lambda score, b, n, i, j: score * 0.5},
    "a cap": {"score_mod": lambda score, b, n, i, j: 30 * jnp.tanh(score / 30)},
    "a decay": {
        "score_mod": lambda score, b, n, i, j: (
            score - jnp.asarray(decay)[n] * jnp.log1p(jnp.abs(i - j).astype(jnp.float32))
        )
    },
    "blocks": {"mask_mod": lambda b, n, i, j: (i // 4) == (j // 4)},
    "nothing but constants": {
        "score_mod": lambda score, b, n, i, j: jnp.float32(2.0),
        "mask_mod": lambda b, n, i, j: jnp.bool_(True),
    },
}


@pytest.mark.thorough(always=["nothing but constants"])
@pytest.mark.parametrize("mods", MODS.values(), ids=MODS)
def test_constants_of_mods(devices, mods):
    attend = partial(fp.flash_attention, **mods)
    x = [draw(4, 12, 4, 8, seed=seed) for seed in range(3)]
    expected = gradient(attend)(*x)
    auto = mesh_of(devices, AxisType.Auto, data=4)
    local = jax.shard_map(attend, mesh=auto, in_specs=ROWS, out_specs=ROWS)
    assert_close(jax.jit(gradient(local))(*x), expected)
    explicit = mesh_of(devices, AxisType.Explicit, data=2, model=2)
    assert_close(jax.jit(gradient(attend))(*(put(explicit, y, BOTH) for y in x)), expected)


@pytest.mark.thorough(always=["P('data', 'model')"])
@pytest.mark.parametrize("spec", [P("data"), P(None, "model"), P("data", "model")], ids=str)
def test_a_score_mod_captures_a_sharded_array(devices, spec):
    mesh = mesh_of(devices, AxisType.Explicit, data=2, model=2)

    def attend(x, w, per_head):
        mod = lambda score, b, n, i, j: score * w[b, n] + per_head[n]
        return fp.flash_attention(x, x, x, score_mod=mod)

    args, specs = (draw(4, 12, 4, 8), draw(4, 4), draw(4)), (BOTH, spec, P("model"))
    found = jax.jit(gradient(attend))(*map(partial(put, mesh), args, specs))
    assert_close(found, gradient(attend)(*args))


def test_a_captured_array_that_jax_cannot_index(devices):
    mesh = mesh_of(devices, AxisType.Explicit, data=4)
    x, w = put(mesh, draw(4, 12, 4, 8), ROWS), put(mesh, draw(4, 4), ROWS)
    mod = lambda score, b, n, i, j: score * w[b][n]
    with pytest.raises(ValueError, match=r"score_mod .* capture it whole.*reshard\(w, jax.P\(\)\)"):
        fp.flash_attention(x, x, x, score_mod=mod)
    with jax.set_mesh(mesh):
        w = jax.sharding.reshard(w, P())
    whole = draw(4, 12, 4, 8), draw(4, 4)
    expected = fp.flash_attention(
        *(whole[0],) * 3, score_mod=lambda score, b, n, i, j: score * whole[1][b][n]
    )
    assert_close(fp.flash_attention(x, x, x, score_mod=mod), expected)


# Functions of jnp that are jitted by themselves, loops and branches: all are traced with types of
# the mesh, and replayed where the function is evaluated.
OF_JNP = {
    "remainder": lambda w, u: lambda s, b, n, i, j: s * ((i + j) % u[b, n] + 1).astype(s.dtype),
    "zeros like": lambda w, u: (
        lambda s, b, n, i, j: s + jnp.where(u > 2, w, jnp.zeros_like(w))[b, n]
    ),
    "one hot": lambda w, u: lambda s, b, n, i, j: s + jax.nn.one_hot(u, 9)[b, n, 2] * w[b, n],
    "lower triangle": lambda w, u: lambda s, b, n, i, j: s + jnp.tril(w)[b, n],
    "random": lambda w, u: (
        lambda s, b, n, i, j: (
            s + jax.random.uniform(jax.random.fold_in(jax.random.key(0), n)) * w[b, n]
        )
    ),
    "a branch": lambda w, u: (
        lambda s, b, n, i, j: s + jax.lax.cond(n > 2, lambda x: x, jnp.sin, w[b, n])
    ),
    "a loop": lambda w, u: (
        lambda s, b, n, i, j: s + jax.lax.fori_loop(0, 3, lambda _, x: jnp.sin(x), w[b, n])
    ),
    "a search": lambda w, u: (
        lambda s, b, n, i, j: s + w[b, n] * jnp.searchsorted(jnp.arange(4), n).astype(s.dtype)
    ),
}


@pytest.mark.thorough(always=["remainder"])
@pytest.mark.parametrize("name", OF_JNP)
def test_a_score_mod_calls_functions_of_jnp(devices, name):
    jax.clear_caches()  # or one that was traced elsewhere is found, with types of no mesh
    mesh = mesh_of(devices, AxisType.Explicit, data=2, model=2)
    u = jnp.arange(16, dtype=jnp.int32).reshape(4, 4) % 5 + 1

    def attend(x, w):
        cut = put(mesh, u, P("data", "model")) if mesh_axes.mesh_of(w) else u
        return fp.flash_attention(x, x, x, score_mod=OF_JNP[name](w, cut))

    args = draw(4, 12, 4, 8), draw(4, 4)
    expected = gradient(attend)(*args)
    jax.clear_caches()
    with jax.set_mesh(mesh):
        found = gradient(attend)(*map(partial(put, mesh), args, (BOTH, P("data", "model"))))
    assert_close(found, expected)


CACHES = {
    "batch": (4, ROWS, ROWS),
    "heads": (4, HEADS, HEADS),
    "batch and heads": (4, BOTH, BOTH),
    "one key head": (1, BOTH, ROWS),
    "fewer key heads than shards": (2, P(None, None, ("model", "data")), P()),
}


@pytest.mark.thorough(always=["batch and heads"])
@pytest.mark.parametrize("case", CACHES.values(), ids=CACHES)
def test_steps_with_a_cache(devices, case):
    """Carries the cache through a loop, so that appending must leave its sharding as it is."""
    kv_heads, q_spec, kv_spec = case
    mesh = mesh_of(devices, AxisType.Explicit, data=2, model=2)

    def steps(cache, q, k, v):
        def step(cache, new):
            q, k, v = new
            cache = fp.append_kv(cache, k, v, rope_theta=1e4)
            return cache, fp.flash_decode(q, *cache[:2], kv_lengths=cache.lengths, num_splits=2)

        return jax.lax.scan(step, cache, (q, k, v))

    old = [draw(4, 32, kv_heads, 8, seed=seed) for seed in (0, 1)]
    cache = fp.KVCache(*old, jnp.array([0, 9, 3, 31], jnp.int32))
    new = [draw(3, 4, 2, n, 8, seed=seed) for n, seed in ((4, 2), (kv_heads, 3), (kv_heads, 4))]
    expected = steps(cache, *new)
    specs = fp.KVCache(kv_spec, kv_spec, P(kv_spec[0] if len(kv_spec) else None))
    cache = jax.tree.map(partial(put, mesh), cache, specs)
    step_specs = [P(None, *spec) for spec in (q_spec, kv_spec, kv_spec)]
    found = jax.jit(steps)(cache, *map(partial(put, mesh), new, step_specs))
    assert_close(found, expected)
    assert_same_types(found[0], cache)


@pytest.mark.thorough(always=["model-True"])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("heads", [None, "model"])
def test_pages_on_explicit_axes(devices, heads, scaled):
    """Cuts sequences over devices; all devices have all the pages, or their heads of them."""
    mesh = mesh_of(devices, AxisType.Explicit, data=2, model=2)
    dtype = jnp.int8 if scaled else jnp.float32
    table = jnp.array([[3, 0], [5, 1], [2, 7], [6, 4]], jnp.int32)
    scales = dict.fromkeys(("k_scale", "v_scale"), jnp.full((8, 2), 0.02)) if scaled else {}

    def step(cache, q, k, table, scales):
        cache = fp.append_kv(cache, k, k, page_table=table, **scales)
        options = {"kv_lengths": cache.lengths, "page_table": table, **scales}
        gathered = fp.gather_pages(cache.k.astype(jnp.float32), table)
        return cache, fp.flash_decode(q, *cache[:2], **options), gathered

    pages = [jnp.round(draw(8, 16, 2, 8, seed=seed)).astype(dtype) for seed in (0, 1)]
    cache = fp.KVCache(*pages, jnp.array([0, 9, 31, 16], jnp.int32))
    args = cache, draw(4, 1, 4, 8, seed=2), draw(4, 1, 2, 8, seed=3), table, scales
    of_pages, rows = P(None, None, heads), P("data", None, heads)
    specs = fp.KVCache(of_pages, of_pages, P("data")), rows, rows, P("data")
    specs = *specs, dict.fromkeys(scales, P())
    sharded = jax.tree.map(partial(put, mesh), args, specs)
    found = jax.jit(step)(*sharded)
    assert_close(found, step(*args))
    assert_same_types(found[0], sharded[0])


@pytest.mark.parametrize("paged", [False, True])
def test_a_cache_that_is_cut_where_it_cannot_be(devices, paged):
    mesh = mesh_of(devices, AxisType.Explicit, data=4)
    k = put(mesh, jnp.ones((4, 16, 4, 8)), ROWS if paged else P(None, "data"))
    options = {"page_table": jnp.zeros((4, 1), jnp.int32), "kv_lengths": 3} if paged else {}
    where = "axis of pages" if paged else "sequence axis"
    with pytest.raises(ValueError, match=f"the {where} of k is sharded over .*'data'.*reshard"):
        fp.flash_decode(jnp.ones((4, 1, 4, 8)), k, k, **options)


@pytest.mark.thorough(always=["1-scaled", "1-ring", "1-drafts"])
@pytest.mark.parametrize("kind", ["contiguous", "ring", "drafts", "scaled"])
@pytest.mark.parametrize("length", [1, 3, 20])
def test_a_layer_with_a_cache(devices, kind, length):
    """Runs the layer with a cache; 20 tokens at once are more than flash_decode takes."""
    mesh = mesh_of(devices, AxisType.Explicit, data=2, model=2)
    layer = fp_nnx.FlashAttention(
        4, 32, num_kv_heads=2, causal=True, window=(7, 0), rope_theta=1e4, rngs=nnx.Rngs(0)
    )
    graph, params = nnx.split(layer)
    apply = lambda x, cache: nnx.merge(graph, params)(x, cache=cache)
    sizes = (4, 8 if kind in ("ring", "drafts") else 32, 2, 8)
    scales = (jnp.full((2,), 0.02),) * 2
    cache = {
        "contiguous": lambda: fp.KVCache.empty(*sizes, jnp.float32),
        "ring": lambda: RingCache.empty(*sizes, jnp.float32),
        "drafts": lambda: RingCache.empty(*sizes, jnp.float32, drafts=2),
        "scaled": lambda: ScaledCache.empty(*sizes, jnp.int8, *scales),
    }[kind]()
    x = draw(4, length, 32)
    expected = apply(x, cache)
    others = {"k_scale": P("model"), "v_scale": P("model"), "written": ROWS}
    others = {name: spec for name, spec in others.items() if name in cache._fields}
    specs = cache._replace(k=BOTH, v=BOTH, lengths=ROWS, **others)
    cache = jax.tree.map(partial(put, mesh), cache, specs)
    with jax.set_mesh(mesh):
        o, new = jax.jit(apply)(put(mesh, x, ROWS), cache)
    assert_close((o, new), expected)
    assert_same_types(new, cache)


def vmapped(q, k, v, bias):
    attend = lambda q, k, v: fp.flash_attention(q, k, v, bias=bias, causal=True)
    return jax.vmap(jax.vmap(attend, (0, 0, None)), (0, None, 0))(q, k, v)


@pytest.mark.thorough(always=["(None, 'data')"])
@pytest.mark.parametrize(
    "cut", [("data",), (None, "data"), ("fsdp", "data"), (None, None, ("data", "fsdp"))], ids=str
)
def test_vmap_over_axes_that_are_cut(eight_devices, cut):
    """Maps twice: v belongs to members of one axis, k to those of the other, the bias to all."""
    mesh = mesh_of(eight_devices, AxisType.Explicit, data=2, fsdp=2, model=2)
    args = draw(4, 2, 4, 9, 4, 8), draw(2, 4, 12, 2, 8), draw(4, 4, 12, 2, 8), draw(1, 4, 9, 12)
    first, second, batch, *_ = (*cut, None, None)
    lead = (first, second, batch, None, "model"), (second, batch, None, "model")
    specs = [P(*names) for names in (*lead, (first, *lead[1][1:]), (None, "model"))]
    sharded = list(map(partial(put, mesh), args, specs))
    call = jax.jit(gradient(vmapped))
    o, grads = call(*sharded)
    assert_close((o, grads), gradient(vmapped)(*args))
    assert_same_types((o, grads[0]), (sharded[0],) * 2)
    assert moved(call.lower(*sharded).compile().as_text()) == 0


FOLDED = {"first": ("data", None), "second": (None, "data"), "both": ("data", "model")}


@pytest.mark.thorough(always=["both"])
@pytest.mark.parametrize("cut", FOLDED.values(), ids=FOLDED)
def test_two_batch_dimensions(devices, cut):
    mesh = mesh_of(devices, AxisType.Explicit, data=2, model=2)
    ids = jnp.sort(jnp.arange(4 * 2 * 12, dtype=jnp.int32).reshape(4, 2, 12) % 3, axis=-1)
    options = {"q_segment_ids": ids, "kv_segment_ids": ids, "kv_lengths": ids[..., 0] + 9}

    def attend(q, k, v, bias, sinks, options):
        return fp.flash_attention(q, k, v, bias=bias, sinks=sinks, **options)

    args = *(draw(4, 2, 12, 4, 8, seed=seed) for seed in range(3)), draw(4, 2, 1, 12, 12), draw(4)
    sharded = [put(mesh, x, P(*cut)) for x in args[:4]] + [put(mesh, args[4], P())]
    cut_options = jax.tree.map(lambda x: put(mesh, x, P(*cut)), options)
    found = jax.jit(gradient(partial(attend, options=cut_options)))(*sharded)
    assert_close(found, gradient(partial(attend, options=options))(*args))
    assert_same_types(found[0], sharded[0])


@pytest.mark.thorough(always=["explicit"])
@pytest.mark.parametrize("types", TYPES.values(), ids=TYPES)
def test_zigzag_of_sharded_sequences(devices, types):
    mesh = mesh_of(devices, types, data=2, context=2)
    x = draw(2, 16, 4, 8)

    def attend(x):
        x = to_zigzag(x, 2)
        how = {"mesh": mesh, "axis": "context", "batch_axis": "data", "layout": "zigzag"}
        return from_zigzag(context_parallel_attention(x, x, x, causal=True, **how), 2)

    alone = lambda x: fp.flash_attention(x, x, x, causal=True)
    sharded = put(mesh, x, P("data", "context"))
    found = jax.jit(gradient(attend))(sharded)
    assert_close(found, gradient(alone)(x))
    assert_same_types(found[0], sharded)


UNEVEN = {
    "12 heads over 8": (2, 12, 12, HEADS, {"model": 8}),
    "12 heads over 8, a batch of 8": (8, 12, 4, HEADS, {"model": 8}),
    "a batch of 12 over 8": (12, 4, 2, ROWS, {"data": 8}),
    "a batch of 1": (1, 4, 2, ROWS, {"data": 4}),
    "both": (3, 6, 3, BOTH, {"data": 2, "model": 4}),
}


@pytest.mark.thorough(always=["12 heads over 8"])
@pytest.mark.parametrize("case", UNEVEN.values(), ids=UNEVEN)
def test_what_the_mesh_does_not_divide(eight_devices, case):
    batch, heads, kv_heads, spec, sizes = case
    number = int(np.prod(list(sizes.values())))
    mesh = mesh_of(eight_devices[:number], AxisType.Auto, **sizes)
    args = [draw(batch, 8, n, 8, seed=seed) for seed, n in enumerate((heads, kv_heads, kv_heads))]

    def constrained(*args):
        cut = (jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec)) for x in args)
        return fp.flash_attention(*cut, causal=True)

    expected = gradient(partial(fp.flash_attention, causal=True))(*args)
    assert_close(jax.jit(gradient(constrained))(*args), expected)


def test_an_axis_that_does_not_divide_heads_cuts_the_batch(eight_devices):
    """Checks that every device then computes one of the 8 entries, not all of them."""
    mesh = mesh_of(eight_devices, AxisType.Auto, model=8)
    x = draw(8, 8, 12, 16)
    cut = lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, HEADS))
    call = jax.jit(lambda x: fp.flash_attention(cut(x), cut(x), cut(x)))
    text = call.lower(x).compile().as_text()
    assert "f32[1,12,1,8,8]" in text and "f32[8,12,1,8,8]" not in text


@pytest.mark.thorough(always=["inside"])
@pytest.mark.parametrize("made", ["before", "inside"])
def test_arrays_that_are_not_placed_on_the_mesh(eight_devices, made):
    x = draw(8, 8, 4, 8)
    attend = lambda x, y: fp.flash_attention(x, x + y, x)
    expected = gradient(attend)(x, x)
    mesh = mesh_of(eight_devices, AxisType.Explicit, data=4, model=2)
    with jax.set_mesh(mesh):
        x = x if made == "before" else jnp.asarray(np.asarray(x))
        assert_close(gradient(attend)(x, x), expected)
        assert_close(jax.jit(gradient(attend))(x, x), expected)


@pytest.mark.thorough(always=["data-explicit", "model-auto"])
@pytest.mark.parametrize("types", TYPES.values(), ids=TYPES)
@pytest.mark.parametrize("manual", [("data",), ("model",), ("data", "fsdp")], ids="-".join)
def test_a_shard_map_over_some_of_the_axes(eight_devices, manual, types):
    mesh = mesh_of(eight_devices, types, data=2, fsdp=2, model=2)
    whole = P(("data", "fsdp"), None, "model")
    keep = lambda names: tuple(n for n in names if n in manual) or None
    spec = P(keep(("data", "fsdp")), None, keep(("model",)))
    args = draw(8, 9, 4, 8), draw(8, 12, 2, 8), draw(8, 12, 2, 8)
    local = partial(fp.flash_attention, causal=True)
    attend = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, axis_names=set(manual))
    found = jax.jit(gradient(attend))(*(put(mesh, x, whole) for x in args))
    assert_close(found, gradient(local)(*args))


def lowered_for_hopper(attend, *args) -> str:
    """Returns the lowered text of a gradient; raises what Pallas or the lowering refuses."""
    loss = lambda *args: jnp.sum(attend(*args).astype(jnp.float32))
    grad = jax.jit(jax.grad(loss, tuple(range(len(args)))))
    return grad.trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def hopper(q, k, v, causal=True):
    backend = HopperBackend(num_sms=132)
    call = validate.canonicalize(q, k, v, Arguments(causal=causal))
    return derivatives.attend(
        backend, call.spec, backend.attention.plan(call.problem), call.operands
    )[0]


@pytest.mark.thorough
@pytest.mark.parametrize("around", ["vmap", "shard_map", "shard_map, Auto"])
def test_the_hopper_kernels_lower_where_axes_are_taken(eight_devices, around):
    """Lowers for Hopper: Pallas refuses axes that are not manual; xla would hide one left over."""
    types = AxisType.Auto if around.endswith("Auto") else AxisType.Explicit
    mesh = mesh_of(eight_devices, types, data=2, fsdp=2, model=2)
    if around == "vmap":
        attend, spec, shape = jax.vmap(hopper), P("data", "fsdp", None, "model"), (2, 4)
    else:
        spec, shape, rows = P(("data", "fsdp"), None, "model"), (4,), P("data")
        how = {"mesh": mesh, "axis_names": {"data"}}
        attend = jax.shard_map(hopper, in_specs=rows, out_specs=rows, **how)
    sharding = NamedSharding(mesh, spec)
    x = jax.ShapeDtypeStruct((*shape, 256, 4, 64), jnp.bfloat16, sharding=sharding)
    text = lowered_for_hopper(attend, x, x, x)
    # What a device computes; nobody cuts what is left of Auto axes inside of a shard_map.
    local = {
        "vmap": "2x256x2x64",
        "shard_map": "1x256x2x64",
        "shard_map, Auto": "2x256x4x64",
    }[around]
    assert "flash_pallas_backward_fused" in text and f"tensor<{local}xbf16>" in text


@pytest.mark.thorough
@pytest.mark.parametrize("around", ["vmap", "shard_map"])
def test_launches_for_far_rows_lower_where_axes_are_taken(eight_devices, around, monkeypatch):
    """Lowers launches that write to arrays of another launch, which has axes of its own."""
    monkeypatch.setattr(launches, "ENOUGH", 1)
    mesh = mesh_of(eight_devices, AxisType.Explicit, data=2, fsdp=2, model=2)
    attend, spec, shape = partial(hopper, causal=False), P("data", None, "model"), (4,)
    if around == "vmap":
        attend, spec, shape = jax.vmap(attend), P("data", "fsdp", None, "model"), (2, 4)
    else:
        rows = P("data")
        how = {"mesh": mesh, "axis_names": {"data"}}
        attend = jax.shard_map(attend, in_specs=rows, out_specs=rows, **how)
    sharding = NamedSharding(mesh, spec)
    x = jax.ShapeDtypeStruct((*shape, 16384, 4, 64), jnp.bfloat16, sharding=sharding)
    text = lowered_for_hopper(attend, x, x, x)
    assert "flash_pallas_backward_fused_far" in text


def collectives(text: str) -> list[tuple[str, str]]:
    """Lists (kind, shape of each result) of everything that devices exchange, sorted."""
    kinds = "all-gather|all-to-all|all-reduce|collective-permute|reduce-scatter"
    lines = re.findall(rf"= (.*?) ({kinds})(?:-start)?\(", text)
    return sorted(
        (kind, shape) for shapes, kind in lines for shape in re.findall(r"\w+\[[\d,]*\]", shapes)
    )


KEYS, WHOLE_KEYS = "f32[2,12,1,8]", "f32[2,12,2,8]"  # of one of four parts of the batch
EXCHANGED = {
    "key heads cut like heads": (2, "model", []),
    # Every device needs the sum over all query heads of its only key head.
    "one key head": (1, None, [("all-reduce", KEYS)] * 2),
    # A device makes the gradient of its own key head; that of whole keys has all of them.
    "whole keys": (2, None, [("all-gather", WHOLE_KEYS)] * 2),
}


@pytest.mark.thorough(always=["one key head-explicit", "whole keys-auto"])
@pytest.mark.parametrize("types", TYPES.values(), ids=TYPES)
@pytest.mark.parametrize("case", EXCHANGED.values(), ids=EXCHANGED)
def test_nothing_is_exchanged_but_gradients_of_keys_and_values(eight_devices, case, types):
    """Checks that the forward moves nothing, though tensor parallelism does not cut its keys."""
    kv_heads, cut, expected = case
    mesh = mesh_of(eight_devices, types, data=2, fsdp=2, model=2)
    rows = ("data", "fsdp")
    q = put(mesh, draw(8, 9, 4, 8), P(rows, None, "model"))
    k = put(mesh, draw(8, 12, kv_heads, 8), P(rows, None, cut))
    attend = partial(fp.flash_attention, causal=True)
    text = jax.jit(attend).lower(q, k, k).compile().as_text()
    assert collectives(text) == []
    text = jax.jit(gradient(attend)).lower(q, k, k).compile().as_text()
    assert collectives(text) == expected


@pytest.mark.thorough(always=["2-explicit"])
@pytest.mark.parametrize("types", TYPES.values(), ids=TYPES)
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_an_nnx_layer_under_logical_axis_rules(eight_devices, kv_heads, types):
    """Puts heads on one axis, features of parameters on another, and the batch on two."""
    mesh = mesh_of(eight_devices, types, data=2, fsdp=2, model=2)
    rules = (("embed", "fsdp"), ("heads", "model"), ("kv_heads", "model" if kv_heads > 1 else None))
    fields = {"num_kv_heads": kv_heads, "causal": True, "rope_theta": 1e4, "use_sinks": True}
    make = lambda: fp_nnx.FlashAttention(4, 32, **fields, rngs=nnx.Rngs(0))
    x = draw(8, 12, 32)

    def step(params, x):
        return gradient(lambda params, x: nnx.merge(graph, params)(x))(params, x)

    graph, params = nnx.split(make())
    expected = jax.jit(step)(params, x)
    with jax.set_mesh(mesh), nnx.logical_axis_rules((*rules, ("kv", None))):
        graph, params = nnx.split(make())
        assert params["query"]["kernel"][...].sharding.spec == P("fsdp", "model", None)
        sharded = put(mesh, x, P(("data", "fsdp")))
        found = jax.jit(step)(params, sharded)
    assert_close(found, expected)
    assert_same_types(found[1], (params, sharded))
