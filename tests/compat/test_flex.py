"""compat.flex against FlexAttention's definition on every query and key, and its windows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flash_pallas.compat import flex
from flash_pallas.compat._band import Band, band_of
from flash_pallas.compat.flex import create_block_mask, flex_attention

from . import flex_cases
from .flex_cases import CASES
from .formulas import assert_close, gradients


def called(case, query, key, value, **captured):
    """Calls flex_attention as a case says; returns (o, lse)."""
    score_mod, mask_mod = case.mods(captured, jnp)
    sizes = (*query.shape[:3], key.shape[2])
    mask = mask_mod and create_block_mask(mask_mod, *sizes, dense=case.dense)
    return flex_attention(query, key, value, score_mod, mask, return_lse=True, **case.options)


@pytest.mark.thorough(always=["sliding window", "prefix", "documents", "alibi", "softcap"])
@pytest.mark.parametrize("name", CASES)
def test_the_definition(name):
    case = CASES[name]
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        arrays = {n: jnp.asarray(x) for n, x in case.drawn().items()}
        floats = [n for n, x in arrays.items() if x.dtype == jnp.float64]
        given = [arrays[n] for n in floats]
        rest = {n: x for n, x in arrays.items() if n not in floats}

        def of(function):
            return lambda *x: function(case, **dict(zip(floats, x, strict=True)), **rest)[0]

        assert_close(called(case, **arrays)[1], flex_cases.formula(case, **arrays)[1])
        o, got = gradients(of(called), given)
        o_want, pulled = gradients(of(flex_cases.formula), given)
    assert_close(o, o_want)
    for one, other in zip(got, pulled, strict=True):
        assert_close(one, other)


@pytest.mark.parametrize("name", [n for n, case in CASES.items() if case.mask and not case.dense])
def test_windows_are_found_and_hold_all_visible_keys(name):
    case = CASES[name]
    captured = {n: jnp.asarray(x) for n, x in case.drawn().items()}
    mask_mod = case.mods(captured, jnp)[1]
    band = band_of(mask_mod)
    assert band.window == case.window
    mask = np.asarray(flex.create_mask(mask_mod, 2, 4, 70, 60))
    i, j = np.arange(70)[:, None], np.arange(60)[None]
    inside = np.ones((70, 60), bool)
    if band.left is not None:
        inside &= j >= i - band.left
    if band.right is not None:
        inside &= j <= i + band.right
    assert not (mask & ~inside).any()
    assert not band.exact or (mask == inside).all()
    assert not band.is_window or band.exact


def test_what_is_no_window():
    large = 2**30 + 1
    for mask_mod in (
        lambda b, h, i, j: i + j <= 5,
        lambda b, h, i, j: 2 * i >= j,
        lambda b, h, i, j: ~(i >= j),
        lambda b, h, i, j: i - j >= -large,
        lambda b, h, i, j: i.astype(jnp.uint32) >= j.astype(jnp.uint32),
    ):
        assert band_of(mask_mod) == Band(exact=False)
    # A window of which one side is negative is one that flash_attention does not have.
    assert band_of(lambda b, h, i, j: j > i + 2).window is None
    assert band_of(flex.noop_mask).is_window


def test_windows_alone_run_without_a_mask_mod():
    options = []
    for mask_mod in (CASES["sliding window"].mods({}, jnp)[1], CASES["prefix"].mods({}, jnp)[1]):
        x = jnp.ones((1, 40, 1, 8))
        options.append(flex._masking(create_block_mask(mask_mod, None, None, 40, 40), x, x))
    assert options[0] == {"window": (7, 0), "mask_mod": None}
    assert options[1]["window"] is None and options[1]["mask_mod"] is not None


def test_masks_are_joined():
    causal, window = (lambda b, h, i, j: i >= j), (lambda b, h, i, j: i - j < 4)
    both = flex.and_masks(causal, window)
    assert band_of(both) == Band(3, 0)
    assert band_of(flex.or_masks(causal, window)) == Band(exact=False)
    mask = flex.create_mask(flex.or_masks(both, lambda b, h, i, j: j == 0), None, 2, 6, 6)
    i, j = np.arange(6)[:, None], np.arange(6)[None]
    assert mask.shape == (1, 2, 6, 6)
    np.testing.assert_array_equal(mask[0, 1], ((i >= j) & (i - j < 4)) | (j == 0))


def test_no_masks_are_joined_as_in_torch():
    for join, shown in ((flex.and_masks, True), (flex.or_masks, False)):
        assert (flex.create_mask(join(), None, None, 3, 4) == shown).all()
        o = flex_attention(X, X, X, block_mask=create_block_mask(join(), None, None, 12, 12))
        np.testing.assert_allclose(o, float(shown), rtol=1e-6)
    with pytest.raises(TypeError, match=r"mask_mods\[0\] is .*and_masks\(\*masks\)"):
        flex.and_masks([flex.noop_mask])


@pytest.mark.parametrize("traced", [False, True], ids=["known", "traced"])
def test_documents_by_ids(traced):
    x = jax.random.normal(jax.random.key(0), (2, 2, 12, 8))
    ids = jnp.stack([jnp.arange(12) // 5, jnp.arange(12) // 3])
    mod = lambda ids: lambda b, h, i, j: (ids[b, i] == ids[b, j]) & (i >= j)

    def by(ids, **options):
        mask = create_block_mask(mod(ids), 2, None, 12, 12, **options)
        return flex_attention(x, x, x, block_mask=mask)

    found = (jax.jit(by) if traced else by)(ids)
    np.testing.assert_allclose(found, by(ids, dense=True), rtol=0, atol=1e-6)


def test_a_block_mask_is_a_pytree():
    x = jax.random.normal(jax.random.key(0), (1, 2, 12, 8))
    ids = jnp.arange(12) // 5
    same = create_block_mask(lambda b, h, i, j: ids[i] == ids[j], None, None, 12, 12, dense=True)
    call = lambda mask: flex_attention(x, x, x, block_mask=mask)
    np.testing.assert_allclose(jax.jit(call)(same), call(same), rtol=0, atol=1e-6)


def test_aux_outputs():
    x = jax.random.normal(jax.random.key(0), (1, 2, 12, 8))
    o, aux = flex_attention(x, x, x, return_aux=flex.AuxRequest(lse=True, max_scores=True))
    scores = np.einsum("bntd,bnsd->bnts", x, x) / np.sqrt(8)
    np.testing.assert_allclose(aux.max_scores, scores.max(-1), rtol=1e-5)
    np.testing.assert_allclose(aux.lse, np.log(np.exp(scores).sum(-1)), rtol=1e-5)
    _, aux = flex_attention(x, x, x, return_aux=flex.AuxRequest(max_scores=True))
    assert aux.lse is None and o.shape == x.shape


X = jnp.ones((1, 2, 12, 8))
TABLE = jnp.ones((12, 12), bool)
CAUSAL = create_block_mask(lambda b, h, i, j: i >= j, None, None, 12, 13)
REFUSED = [
    ({"kernel_options": {"BLOCK_M": 64}}, "kernel_options is .*pass blocks="),
    ({"block_mask": CAUSAL}, "was made for .*12, 13"),
    ({"key": X[:, :1], "value": X[:, :1]}, "enable_gqa=True"),
    ({"return_lse": True, "return_aux": flex.AuxRequest()}, "both given"),
]


@pytest.mark.parametrize(("options", "told"), REFUSED)
def test_what_is_refused(options, told):
    with pytest.raises(ValueError, match=told):
        flex_attention(**{"query": X, "key": X, "value": X, **options})


def test_masks_that_are_refused():
    with pytest.raises(ValueError, match=r"device is 'cuda'.*leave it out"):
        create_block_mask(flex.noop_mask, None, None, 12, 12, device="cuda")
    with pytest.raises(ValueError, match=r"by q_idx or kv_idx.*dense=True"):
        create_block_mask(lambda b, h, i, j: TABLE[i, j], None, None, 12, 12)
    with pytest.raises(TypeError, match=r"must come from create_block_mask\(.*got an array"):
        flex_attention(X, X, X, block_mask=jnp.ones((12, 12), bool))
