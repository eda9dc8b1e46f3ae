"""Random meshes, and random shardings of arrays: results equal one device's, to rounding.

FLASH_PALLAS_EXAMPLES=500 looks further than the few of the default run; what it draws is the same
every time.
"""

from __future__ import annotations

import math
import os
from functools import partial

import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import flash_pallas as fp

from .test_meshes import assert_close, assert_same_types, gradient
from .test_sharding import draw as normal

PARTS = 8  # tests that may run side by side
EXAMPLES = int(os.environ.get("FLASH_PALLAS_EXAMPLES", "16"))
NAMES = ("data", "fsdp", "model", "context")
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
T, S, H = 9, 12, 8


def numbered(score, b, n, i, j):
    """Modifies scores by the entry and head numbers of the whole call."""
    return score * 0.5 + (b - n).astype(score.dtype)


@st.composite
def meshes(draw):
    """Draws one to three mesh axes with one to eight devices in all."""
    names = draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=3, unique=True))
    sizes: dict[str, int] = {}
    for name in names:
        left = 8 // math.prod(sizes.values())
        sizes[name] = draw(st.sampled_from([n for n in (1, 2, 4, 8) if n <= left]))
    one = st.sampled_from([AUTO, EXPLICIT]).map(lambda kind: (kind,) * len(sizes))
    several = st.tuples(*(st.sampled_from([AUTO, EXPLICIT]),) * len(sizes))
    return sizes, draw(st.one_of(one, one, several))


@st.composite
def cuts(draw, sizes, axes):
    """Draws, for each array axis, mesh axes in any order whose product divides its length.

    Args:
        sizes: sizes of the mesh axes.
        axes: lengths of the array's axes, None for one that is not cut.
    """
    free, spec = draw(st.permutations(sorted(sizes))), []
    for length in axes:
        mine: list[str] = []
        while length is not None and free and draw(st.booleans()):
            if length % math.prod(sizes[name] for name in (*mine, free[0])):
                break
            mine.append(free.pop(0))
        spec.append(tuple(mine) or None)
    return P(*spec)


@st.composite
def calls(draw):
    """Draws (mesh, shapes of arrays, their specs, the spec of constraints inside jit, options)."""
    sizes, types = draw(meshes())
    batch = draw(st.sampled_from([1, 2, 3, 4, 8, 12]))
    kv_heads, group = draw(st.sampled_from([1, 2, 3, 4, 8])), draw(st.sampled_from([1, 2, 4]))
    heads = kv_heads * group
    shapes = {
        "q": (batch, T, heads, H),
        "k": (batch, S, kv_heads, H),
        "v": (batch, S, kv_heads, H),
    }
    if draw(st.booleans()):
        entries = draw(st.sampled_from([1, batch]))
        shapes["bias"] = (entries, draw(st.sampled_from([1, heads])), T, S)
    if draw(st.booleans()):
        shapes["sinks"] = (heads,)
    specs = {}
    for name, shape in shapes.items():
        places = {"sinks": "n", "bias": "bn.."}.get(name, "b.n.")
        axes = [None if p == "." else n for p, n in zip(places, shape, strict=True)]
        specs[name] = draw(cuts(sizes, axes))
    uneven = None
    if AUTO in types and draw(st.booleans()):  # JAX lets only the compiler cut unevenly.
        auto = [name for name, kind in zip(sizes, types, strict=True) if kind == AUTO]
        uneven = draw(st.sampled_from([P(auto[0]), P(None, None, auto[-1])]))
    options = {
        "causal": draw(st.booleans()),
        "kv_lengths": np.arange(batch, dtype=np.int32) % S + 1 if draw(st.booleans()) else None,
        "score_mod": draw(st.sampled_from([None, numbered])),
        **draw(st.sampled_from([{}, {"dropout_rate": 0.3, "dropout_seed": 7}])),
    }
    return (sizes, types), shapes, specs, uneven, options


def attend(names, mesh, uneven, options, *arrays):
    given = dict(zip(names, arrays, strict=True))
    if uneven is not None:
        cut = lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, uneven))
        given |= {name: cut(given[name]) for name in "qkv"}
    return fp.flash_attention(**given, **options)


@pytest.mark.thorough(always=["0"])
@pytest.mark.parametrize("part", range(PARTS))
def test_a_mesh_computes_what_one_device_does(part, eight_devices):
    @hypothesis.seed(part)
    @hypothesis.settings(
        max_examples=-(-EXAMPLES // PARTS),
        deadline=None,
        database=None,
        phases=[hypothesis.Phase.generate],  # Each example is compiled twice: none is made smaller.
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(calls())
    def check(call):
        hypothesis.note(repr(call))
        (sizes, types), shapes, specs, uneven, options = call
        number = math.prod(sizes.values())
        mesh = jax.make_mesh(
            tuple(sizes.values()), tuple(sizes), types, devices=eight_devices[:number]
        )
        arrays = [normal(*shape, seed=seed) for seed, shape in enumerate(shapes.values())]
        sharded = [
            jax.device_put(x, NamedSharding(mesh, spec))
            for x, spec in zip(arrays, specs.values(), strict=True)
        ]
        alone = jax.jit(gradient(partial(attend, tuple(shapes), mesh, None, options)))
        parts = jax.jit(gradient(partial(attend, tuple(shapes), mesh, uneven, options)))
        found = parts(*sharded)
        assert_close(found, alone(*arrays))
        assert_same_types(found[1], tuple(sharded))

    check()
