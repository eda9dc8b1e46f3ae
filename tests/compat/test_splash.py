"""compat.splash against jax's own reference of splash attention, and its masks against jax's."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu import splash_attention as theirs
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as their_masks

from flash_pallas.compat import splash as ours

from .formulas import gradients

HEADS, T, S = 4, 40, 52
SHAPE = (T, S)


class Both:
    """Masks of jax and of this package, made by the same text: names of classes and operators."""

    def __init__(self, text: str):
        random = np.random.default_rng(0).uniform(size=SHAPE) > 0.3
        random[:, 0] = True
        names = {"random": random, "SHAPE": SHAPE, "T": T}
        self.theirs = eval(text, {**vars(their_masks), **names})
        self.ours = eval(text, {**vars(ours), **names})


# Lists of masks, one for each head or one for all.
MASKS = {
    "full": "[FullMask(SHAPE)]",
    "causal": "[CausalMask(SHAPE)]",
    "causal, shifted": "[CausalMask(SHAPE, 12)]",
    "local": "[LocalMask(SHAPE, (7, 3), 0)]",
    "local, shifted": "[LocalMask(SHAPE, (7, 3), 9)]",
    "left of it": "[LocalMask(SHAPE, (6, None), 0)]",
    "right of it": "[LocalMask(SHAPE, (None, 4), -2)]",
    "local and causal": "[LocalMask(SHAPE, (9, None), 0) & CausalMask(SHAPE)]",
    "local or causal": "[LocalMask(SHAPE, (0, 5), 0) | CausalMask(SHAPE, 2)]",
    "chunks": "[ChunkedCausalMask(SHAPE, 16)]",
    "array": "[NumpyMask(random)]",
    "array and causal": "[NumpyMask(random) & CausalMask(SHAPE)]",
    "heads differ": "[CausalMask(SHAPE), FullMask(SHAPE)] * 2",
    "causal and shifted by head": "[CausalMask(SHAPE, 3), CausalMask(SHAPE)] * 2",
    "windows of heads differ": "[LocalMask(SHAPE, (2**n, 0), 0) for n in range(4)]",
    "heads of all kinds": (
        "[ChunkedCausalMask(SHAPE, 16), NumpyMask(random), CausalMask(SHAPE)] * 2"
    ),
}
HEADS_OF = {"heads of all kinds": 6}


def arrays(heads: int, kv_heads: int = 2):
    draw = lambda i, *shape: jax.random.normal(jax.random.key(i), (*shape, 16))
    return draw(0, heads, T) / 4, draw(1, kv_heads, S), draw(2, kv_heads, S)


def close(found, wanted):
    """Checks for equality in float32: sums of 52 terms in two orders."""
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-6 * max(1, np.abs(wanted).max()))


def of_heads(masks, heads: int):
    return masks * heads if len(masks) == 1 else masks


@pytest.mark.thorough(
    always=["alone-local, shifted", "segments-chunks", "alone-windows of heads differ"]
)
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("with_ids", [False, True], ids=["alone", "segments"])
def test_the_reference(name, with_ids):
    both, heads = Both(MASKS[name]), HEADS_OF.get(name, HEADS)
    # Every query sees key 0 of its document, as splash attention wants some key for each; with
    # windows there is one segment, and padding at the end of the keys.
    ids = None
    if with_ids:
        ids = theirs.SegmentIds(jnp.zeros(T, int), jnp.where(jnp.arange(S) < 45, 0, 7))
    mask = their_masks.MultiHeadMask(of_heads(both.theirs, heads))
    reference = theirs.make_masked_mha_reference(mask)
    kernel = ours.make_splash_mha(ours.MultiHeadMask(of_heads(both.ours, heads)))
    o, got = gradients(lambda *x: kernel(*x, ids), arrays(heads))
    wanted, pulled = gradients(lambda *x: reference(*x, ids), arrays(heads))
    close(o, wanted)
    for one, other in zip(got, pulled, strict=True):
        close(one, other)
    # jax's own objects make the same kernel.
    np.testing.assert_array_equal(ours.make_splash_mha(mask)(*arrays(heads), ids), o)


@pytest.mark.parametrize("name", MASKS)
def test_only_arrays_take_quadratic_memory(name):
    masks = of_heads(Both(MASKS[name]).ours, HEADS_OF.get(name, HEADS))
    kernel = ours.make_splash_mha(ours.MultiHeadMask(masks))
    dense = kernel.options.get("mask")
    assert (dense is not None) == ("NumpyMask" in MASKS[name])
    if dense is not None:
        assert dense.shape == (1 if len(set(map(type, masks))) == 1 else len(masks), *SHAPE)


def test_softcap_sinks_residuals_and_a_batch():
    masks = [their_masks.CausalMask(SHAPE)] * HEADS
    options = {"attn_logits_soft_cap": 2.0, "save_residuals": True}
    mask = their_masks.MultiHeadMask(masks)
    sinks = jnp.array([0.5, -1.0, 2.0, 0.0])
    kernel = ours.make_splash_mha(mask, **options)
    o, (lse,) = kernel(*arrays(HEADS), None, sinks)
    reference = theirs.make_masked_mha_reference(mask)
    wanted, (wanted_lse,) = reference(*arrays(HEADS), None, sinks, **options)
    close(o, wanted)
    close(lse, wanted_lse)
    batch = tuple(jnp.stack([x, 2 * x]) for x in arrays(HEADS))
    o2 = jax.vmap(kernel, (0, 0, 0, None, None))(*batch, None, sinks)[0]
    close(o2[0], wanted)


def test_one_key_head():
    q, k, v = arrays(HEADS, 1)
    masks = of_heads([their_masks.LocalMask(SHAPE, (5, 2), 3)], HEADS)
    reference = theirs.make_masked_mqa_reference(their_masks.MultiHeadMask(masks))
    kernel = ours.make_splash_mqa(their_masks.MultiHeadMask(masks))
    close(kernel(q, k[0], v[0]), reference(q, k[0], v[0], None))


def test_a_mask_that_is_an_array():
    shown = np.random.default_rng(1).uniform(size=(HEADS, *SHAPE)) > 0.5
    shown[..., 0] = True
    wanted = theirs.make_masked_mha_reference(shown)(*arrays(HEADS), None)
    close(ours.make_splash_mha(shown)(*arrays(HEADS)), wanted)
    close(ours.make_splash_mha(jnp.asarray(shown))(*arrays(HEADS)), wanted)


@pytest.mark.parametrize("name", ["heads differ", "array", "local"])
def test_a_kernel_is_a_pytree(name):
    masks = of_heads(Both(MASKS[name]).ours, HEADS)
    kernel = ours.make_splash_mha(ours.MultiHeadMask(masks))
    assert len(jax.tree.leaves(kernel)) == (name == "array")
    passed = jax.jit(lambda kernel, *x: kernel(*x))(kernel, *arrays(HEADS))
    close(passed, kernel(*arrays(HEADS)))


@pytest.mark.parametrize("name", [x for x in MASKS if "head" not in x])
def test_masks_are_indexed_like_arrays(name):
    both = Both(MASKS[name])
    (one,), (other,) = both.ours, both.theirs
    np.testing.assert_array_equal(one[:, :], other[:, :])
    np.testing.assert_array_equal(one[3:9, :20], other[3:9, :20])


CAUSAL = ours.MultiHeadMask([ours.CausalMask(SHAPE)] * HEADS)
REFUSED = [
    ({"block_sizes": 128}, "block_sizes is 128.*pass blocks="),
    ({"mask_value": -1e9}, "mask_value"),
    ({"head_shards": 2}, "head_shards is 2"),
    ({"q_seq_shards": 2}, "flash_pallas.parallel"),
    ({"residual_checkpoint_name": "context"}, "save_attention"),
    ({"interpret": True}, "interpret is True"),
    ({"downcast_smem_data": False}, "downcast_smem_data"),
    ({"mask": jnp.ones(SHAPE, bool)}, r"it must be \[heads, queries, keys\]"),
]


@pytest.mark.parametrize(("options", "told"), REFUSED, ids=[next(iter(x)) for x, _ in REFUSED])
def test_what_is_refused(options, told):
    with pytest.raises(ValueError, match=told):
        ours.make_splash_mha(**{"mask": CAUSAL, **options})


def test_masks_that_are_refused():
    with pytest.raises(TypeError, match="it must be a MultiHeadMask"):
        ours.make_splash_mha(ours.CausalMask(SHAPE))
    with pytest.raises(TypeError, match="truth value"):
        assert ours.CausalMask(SHAPE) and ours.FullMask(SHAPE)
    with pytest.raises(ValueError, match="cannot be joined"):
        ours.CausalMask(SHAPE) & ours.FullMask((3, 3))
    with pytest.raises(ValueError, match="all of one shape"):
        ours.MultiHeadMask([ours.CausalMask(SHAPE), ours.FullMask((3, 3))])
    with pytest.raises(ValueError, match="bool"):
        ours.NumpyMask(np.ones(SHAPE))
    nothing = ours.LocalMask(SHAPE, (0, None), 9) & ours.CausalMask(SHAPE)
    with pytest.raises(ValueError, match="shows no key to any query"):
        ours.make_splash_mha(ours.MultiHeadMask([nothing]))

    class Own(their_masks.Mask):
        shape = SHAPE

    with pytest.raises(TypeError, match=r"mask is a Own, which is not known here.*NumpyMask"):
        ours.make_splash_mha(ours.MultiHeadMask([Own()]))
    with pytest.raises(ValueError, match="make the kernel for these"):
        ours.make_splash_mha(CAUSAL)(*arrays(HEADS + 2))
