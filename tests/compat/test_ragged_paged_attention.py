"""compat.ragged_paged_attention against jax's own reference of its TPU kernel."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel as theirs

import flash_pallas as fp
from flash_pallas.backends.hopper import HopperBackend
from flash_pallas.backends.portable import PortableBackend
from flash_pallas.compat import ragged_paged_attention as ours
from flash_pallas.frontend.validate_ragged import RaggedArguments
from flash_pallas.ragged import prepared

PAGES, PAGE, N, K, H = 20, 16, 4, 2, 32


def drawn(dtype="float32", num_seqs: int = 3):
    """Draws the arrays of a call: a chunk, a step, a prompt; room for one sequence more."""
    rng = np.random.default_rng(0)
    count, lengths = (9, 1, 20, 0), (40, 64, 20, 5)
    found = (
        rng.standard_normal((40, N, H)).astype(np.float32),
        (rng.standard_normal((PAGES, PAGE, 2 * K, H)) * (20 if dtype == "int8" else 1)),
        np.array(lengths, np.int32),
        rng.permutation(PAGES)[:16].reshape(4, 4).astype(np.int32),
        np.cumsum([0, *count]).astype(np.int32),
        np.array([num_seqs], np.int32),
    )
    q, pages, *integers = map(jnp.asarray, found)
    return q, pages.astype(dtype), *integers


OPTIONS = {
    "plain": {},
    "window": {"sliding_window": 13, "sm_scale": 0.2},
    "own key alone": {"sliding_window": 1, "soft_cap": 2.0},
    "scales": {"k_scale": 0.5, "v_scale": 3.0, "sm_scale": -0.3},
    "int8": {"k_scale": 0.02, "v_scale": 0.03},
    "int8, one scale": {"v_scale": 0.03, "sm_scale": 0.01},
}


@pytest.mark.thorough(always=["window", "int8"])
@pytest.mark.parametrize("name", OPTIONS)
def test_jax_reference(name):
    given = drawn("int8" if "int8" in name else "float32", num_seqs=2 if name == "window" else 3)
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        wanted = theirs.ref_ragged_paged_attention(*given, **OPTIONS[name])
        if name == "int8, one scale":  # theirs would multiply q by integers
            pages = given[1].astype(jnp.float32)
            call = theirs.ref_ragged_paged_attention
            wanted = call(given[0], pages, *given[2:], **OPTIONS[name])
    found = ours.ragged_paged_attention(*given, **OPTIONS[name])
    np.testing.assert_allclose(found[: len(wanted)], wanted, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(found[len(wanted) :], 0.0)


def test_pages_are_not_copied():
    q, _, *integers = drawn()
    pages = jnp.zeros((2000, PAGE, 2 * K, H))
    call = jax.jit(lambda q, pages: ours.ragged_paged_attention(q, pages, *integers))
    memory = call.lower(q, pages).compile().memory_analysis()
    assert memory.temp_size_in_bytes < pages.nbytes / 4


@pytest.mark.thorough(always=["Explicit"])
@pytest.mark.parametrize("axis", ["Explicit", "Auto"])
def test_heads_on_a_mesh(axis, devices):
    given = drawn()
    wanted = ours.ragged_paged_attention(*given)
    kinds = (getattr(jax.sharding.AxisType, axis),)
    mesh = jax.make_mesh((2,), ("model",), axis_types=kinds, devices=devices[:2])
    put = lambda x, *spec: jax.device_put(x, jax.NamedSharding(mesh, jax.P(*spec)))
    with jax.set_mesh(mesh):
        q, pages = put(given[0], None, "model"), put(given[1], None, None, "model")
        found = ours.ragged_paged_attention(q, pages, *given[2:])
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


def test_kernels_say_why_not():
    q, pages, lengths, table, ends, _ = drawn("bfloat16")
    places = RaggedArguments(lengths, table, ends, v_head_dim=H, v_first=H)
    both = pages.reshape(PAGES, PAGE, K, 2 * H)
    for there in (HopperBackend(capability="9.0"), PortableBackend(capability="8.0")):
        _, spec, operands = prepared(q.astype("bfloat16"), both, None, places, "xla")
        reason = there.ragged.refusal(fp.core.ragged.describe(operands, spec))
        assert "no values that lie behind the keys" in str(reason)


BAD = {
    "odd heads": ((1, jnp.ones((5, 16, 3, 32))), {}, ValueError, r"kv_pages has shape \(5, 16, 3"),
    "rank": ((1, jnp.ones((16, 4, 32))), {}, ValueError, r"kv_pages has shape \(16, 4, 32\)"),
    "window": ((0, None), {"sliding_window": 0}, ValueError, "sliding_window is 0: it must be at"),
    "scale": (
        (0, None),
        {"k_scale": jnp.ones(2)},
        TypeError,
        "k_scale is .*a finite Python number",
    ),
    "tiles": ((0, None), {"num_queries_per_block": 8}, ValueError, "choose their tiles"),
    "mask": ((0, None), {"mask_value": -1e9}, ValueError, "hidden scores are -inf"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_refused(name):
    (place, other), options, error, message = BAD[name]
    given = list(drawn())
    if other is not None:
        given[place] = other
    with pytest.raises(error, match=message):
        ours.ragged_paged_attention(*given, **options)
