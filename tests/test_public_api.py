"""The package's exports, their documentation, and that its examples run."""

from __future__ import annotations

import doctest
import functools
import inspect
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import flash_pallas as fp
from flash_pallas import api, cache, decode, devices, ragged, tuning
from flash_pallas.core import block_mask, rope
from flash_pallas.frontend import dispatch, validate
from flash_pallas.frontend import explain as explain_
from flash_pallas.parallel import context, layout, setting

NAMES = [
    "BlockMask",
    "Explanation",
    "KVCache",
    "Tuning",
    "UnsupportedByBackend",
    "append_kv",
    "append_ragged_kv",
    "apply_rope",
    "autotune",
    "check_pages",
    "dot_product_attention",
    "explain",
    "flash_attention",
    "flash_attention_varlen",
    "flash_attention_with_lse",
    "flash_attention_with_max_logit",
    "flash_decode",
    "gather_pages",
    "ragged_paged_attention",
    "save_attention",
    "target",
]
DELEGATING = ["autotune", "flash_attention_with_lse", "flash_attention_with_max_logit"]
FUNCTIONS = [
    "append_kv",
    "append_ragged_kv",
    "apply_rope",
    "dot_product_attention",
    "explain",
    "flash_attention",
    "flash_attention_varlen",
    "flash_decode",
    "ragged_paged_attention",
    *DELEGATING,
]


def test_the_exported_names():
    assert sorted(fp.__all__) == NAMES
    assert all(hasattr(fp, name) for name in NAMES)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_documentation(name):
    function = getattr(fp, name)
    doc = inspect.getdoc(function)
    for section in ("Args:", "Returns:", "Raises:", "Example:"):
        assert section in doc
    described = doc[doc.index("Args:") : doc.index("Returns:")]
    for parameter in inspect.signature(function).parameters.values():
        parameter = str(parameter).partition(":")[0].partition("=")[0]
        delegated = name in DELEGATING and parameter not in ("q", "k", "v", "backend", "blocks")
        assert delegated or f"\n    {parameter}: " in described, parameter
    assert name not in DELEGATING or "as in `flash_attention`, as are all the others" in described


@pytest.mark.parametrize(
    "name", ["BlockMask", "Explanation", "KVCache", "Tuning", "UnsupportedByBackend"]
)
def test_classes_are_documented(name):
    assert inspect.getdoc(getattr(fp, name))


EXAMPLES = [
    (api, 10),
    (block_mask, 11),
    (cache, 15),
    (context, 4),
    (decode, 5),
    (explain_, 6),
    (devices, 6),
    (layout, 8),
    (ragged, 5),
    (rope, 3),
    (setting, 6),
    (tuning, 4),
]


@pytest.mark.parametrize(("module", "at_least"), EXAMPLES)
def test_examples(module, at_least):
    results = doctest.testmod(module)
    assert results.attempted >= at_least and results.failed == 0


def test_one_signature():
    told = lambda f: [(p.name, p.default) for p in inspect.signature(f).parameters.values()]
    for name in DELEGATING:
        assert told(fp.flash_attention) == told(getattr(fp, name))


def test_unknown_argument():
    x = jnp.ones((2, 16, 4, 64))
    with pytest.raises(TypeError, match=r"flash_attention.*unexpected keyword argument 'colour'\n"):
        fp.explain(fp.flash_attention, x, x, x, colour=3)


def test_what_a_package_shows_is_its_names_and_modules():
    for module in (fp, fp.nn, fp.integrations, fp.compat, fp.parallel):
        assert set(module.__all__) <= set(dir(module))
        assert not [name for name in dir(module) if name.startswith("_")]
    assert dir(fp.parallel) == sorted(fp.parallel.__all__)
    modules = ["compat", "conformance", "integrations", "nn", "parallel", "reference", "typing"]
    assert dir(fp) == sorted([*fp.__all__, *modules])
    assert fp.nn.linen.FlashAttention and fp.integrations.equinox.to_flash
    with pytest.raises(AttributeError, match="module 'flash_pallas' has no attribute 'nm'"):
        fp.nm  # noqa: B018


ELSEWHERE = [
    ("flash_attention", {"is_causal": True}, "'is_causal'; did you mean 'causal'"),
    ("flash_attention", {"segment_ids": 0}, "did you mean 'q_segment_ids' and 'kv_segment_ids'"),
    ("flash_attention_with_lse", {"sm_scale": 0.5}, "did you mean 'scale'"),
    ("flash_attention", {"implementation": "cudnn"}, "did you mean 'backend'"),
    ("flash_attention", {"casual": True}, "did you mean 'causal'"),
    ("dot_product_attention", {"causal": True}, "did you mean 'is_causal'"),
    ("dot_product_attention", {"window": 3}, "did you mean 'local_window_size'"),
    ("flash_decode", {"cache_seqlens": 3}, "did you mean 'kv_lengths'"),
    ("flash_decode", {"block_tables": 3}, r"flash_decode\(\).*did you mean 'page_table'"),
    ("autotune", {"attn_mask": 3, "is_causal": True}, "did you mean 'mask' and 'causal'"),
]


@pytest.mark.parametrize(("name", "options", "message"), ELSEWHERE)
def test_names_that_other_libraries_use(name, options, message):
    x = jnp.ones((2, 1, 4, 64))
    with pytest.raises(TypeError, match=message):
        getattr(fp, name)(x, x, x, **options)


MEANT = [
    ("flash_attention", "query", "'q'? the layout is .* where PyTorch has heads first"),
    ("flash_attention", "is_causal", "'causal'? positions count from the first query"),
    ("flash_attention", "attn_mask", "'mask'? mask is bool, .* floats .* are bias$"),
    ("flash_attention", "attention_mask", "'mask'? .* kv_lengths"),
    ("flash_attention", "attn_bias", "'bias'? bias is .* has a gradient"),
    ("flash_attention", "dropout_p", "'dropout_rate'? .* needs dropout_seed"),
    ("flash_attention", "dropout_rng", "'dropout_seed'? .* other weights"),
    ("flash_attention", "softmax_scale", "'scale'?$"),
    ("flash_attention", "window_size", r"'window'? window is \(left, right\), and None, not -1"),
    ("flash_attention", "sliding_window", r"'window'? .*\(sliding_window - 1, 0\)"),
    ("flash_attention", "segment_ids", "'q_segment_ids' and 'kv_segment_ids'? .* negative ids"),
    ("flash_attention", "key_value_seq_lengths", "'kv_lengths'?$"),
    ("flash_attention", "logits_soft_cap", "'softcap'? softcap acts after scale"),
    ("flash_attention", "implementation", "'backend'? the choices are 'auto'"),
    ("flash_attention", "cu_seqlens_q", "argument 'cu_seqlens_q': flash_attention_varlen takes"),
    ("flash_attention", "max_seqlen_k", "argument 'max_seqlen_k': leave it out"),
    ("flash_attention", "return_lse", "argument 'return_lse': flash_attention_with_lse returns"),
    ("flash_attention", "return_attn_probs", ": the weights never .*; flash_attention_with_lse"),
    ("flash_attention", "enable_gqa", ": k and v may always have fewer heads"),
    ("flash_attention", "dtype", ": the result has q's dtype"),
    ("flash_attention", "module", ": .* flash_pallas.nn.attention_fn"),
    ("dot_product_attention", "window_size", "'local_window_size'? local_window_size is"),
    ("dot_product_attention", "softcap", "argument 'softcap': flash_attention has 'softcap'"),
    ("dot_product_attention", "segment_ids", ": flash_attention has 'q_segment_ids' and"),
    ("dot_product_attention", "block_mask", "argument 'block_mask': flash_attention has it"),
    ("flash_attention_varlen", "block_mask", "'mask_mod'? mask_mod is the function that makes a"),
    ("flash_decode", "block_mask", "argument 'block_mask': flash_attention has it"),
    ("flash_decode", "cache_seqlens", "'kv_lengths'? kv_lengths counts the new tokens too"),
    ("flash_decode", "return_softmax_lse", "'return_lse'?$"),
    ("flash_attention_varlen", "cu_seqlens_k", "'cu_seqlens_kv'?$"),
    ("flash_attention_varlen", "max_seqlen_q", "argument 'max_seqlen_q': leave it out"),
]


@pytest.mark.parametrize(("name", "option", "message"), MEANT)
def test_hints_say_what_differs(name, option, message):
    x = jnp.ones((2, 1, 4, 64))
    with pytest.raises(TypeError, match=message.replace("?", r"\?")):
        getattr(fp, name)(x, x, x, **{option: 1})


def test_hints_are_of_names_that_we_lack():
    synonyms = {name for group in validate.SYNONYMS for name in group.split()}
    assert set(validate.MEANINGS) <= synonyms
    assert all(repr(name) in validate.MEANINGS["implementation"] for name in dispatch.BACKENDS)
    own = set(inspect.signature(fp.flash_attention).parameters)
    assert set(validate.INSTEAD) & own == {
        "block_mask",
        "causal",
        "deterministic",
    }  # others lack them


def test_synonyms_are_of_arguments_that_exist():
    functions = [
        fp.flash_attention,
        fp.flash_attention_varlen,
        fp.flash_decode,
        fp.ragged_paged_attention,
    ]
    names = set().union(*(inspect.signature(f).parameters for f in functions))
    assert {group.split()[0] for group in validate.SYNONYMS} <= names


FLASH_ATTN = (
    "dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic "
    "return_attn_probs cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k block_table"
)
TORCH = "query key value attn_mask dropout_p is_causal scale enable_gqa"
TOKAMAX = "logits_soft_cap local_window_size q_sharding precision"
OTHERS = "attention_mask sliding_window segment_ids position_ids s_aux key_padding_mask block_mask"


@pytest.mark.parametrize("function", [fp.flash_attention, fp.flash_attention_varlen])
def test_every_argument_of_other_libraries_gets_an_answer(function):
    theirs = (jax.nn.dot_product_attention, linen.dot_product_attention, nnx.dot_product_attention)
    names = set().union(*(inspect.signature(f).parameters for f in theirs))
    names |= set(" ".join([FLASH_ATTN, TORCH, TOKAMAX, OTHERS]).split())
    ours = inspect.signature(function).parameters
    for name in sorted(names - set(ours)):
        told = validate.unexpected(function.__name__, [name], ours).partition(f"{name!r}")[2]
        assert told.startswith(("; did you mean '", ": ")), (name, told)


def test_the_signature_of_jax_nn():
    ours = inspect.signature(fp.dot_product_attention).parameters
    theirs = inspect.signature(jax.nn.dot_product_attention).parameters
    assert list(ours) == list(theirs)
    for name, parameter in theirs.items():
        assert (ours[name].kind, ours[name].default) == (parameter.kind, parameter.default)


def draw(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def inputs(*batch):
    shapes = ((*batch, 9, 4, 16), (*batch, 12, 2, 16), (*batch, 12, 2, 16))
    return [draw(seed, *shape) for seed, shape in enumerate(shapes)]


def mask_of(*shape):
    """Draws a mask with two thirds visible, the first key always: no row is empty."""
    return (draw(8, *shape) > -0.5).at[..., 0].set(True)


B1, N1, T1, S1 = (1, 4, 9, 12), (2, 1, 9, 12), (2, 4, 1, 12), (2, 4, 9, 1)
LIKE_JAX_NN = {
    "nothing": {},
    "implementation": {"implementation": "xla"},
    "scale": {"scale": 0.3},
    "causal": {"is_causal": True},
    "bias": {"bias": draw(5, 2, 4, 9, 12)},
    "bias without batch": {"bias": draw(5, *B1)},
    "bias without heads": {"bias": draw(5, *N1)},
    "bias without queries": {"bias": draw(5, *T1)},
    "bias without keys": {"bias": draw(5, *S1)},
    "bias of rank 2": {"bias": draw(5, 9, 12)},
    "bias in bfloat16": {"bias": draw(5, *B1).astype(jnp.bfloat16)},
    "mask": {"mask": mask_of(2, 4, 9, 12)},
    "mask without batch": {"mask": mask_of(*B1)},
    "mask without heads": {"mask": mask_of(*N1)},
    "mask without queries": {"mask": mask_of(*T1)},
    "mask without keys": {"mask": jnp.ones(S1, bool)},
    "mask of rank 1": {"mask": mask_of(12)},
    "mask of padding": {"mask": mask_of(2, 1, 1, 12), "bias": draw(5, 1, 4, 1, 1)},
    "lengths of queries": {"query_seq_lengths": jnp.array([9, 5], jnp.int32)},
    "lengths of keys": {"key_value_seq_lengths": jnp.array([12, 1], jnp.int32)},
    "both lengths, causal": {
        "query_seq_lengths": jnp.array([4, 9], jnp.int32),
        "key_value_seq_lengths": jnp.array([7, 12], jnp.int32),
        "is_causal": True,
    },
    "window": {"local_window_size": 3},
    "pair": {"local_window_size": (2, 5)},
    "pair, causal": {"local_window_size": (2, 5), "is_causal": True},
    "all": {
        "bias": draw(5, *T1),
        "mask": mask_of(*N1),
        "is_causal": True,
        "local_window_size": (12, 1),
        "key_value_seq_lengths": jnp.array([3, 12], jnp.int32),
        "scale": -0.2,
    },
}


def assert_same_as_jax_nn(args, keywords, valid=None):
    """Compares with jax.nn: values, and gradients of q, k, v and bias; only rows in `valid`."""
    differentiable = {"bias": keywords["bias"]} if "bias" in keywords else {}
    rest = {name: x for name, x in keywords.items() if name != "bias"}
    weight = draw(9, *args[0].shape)
    if valid is not None:
        weight = jnp.where(valid[..., None, None], weight, 0.0)

    def run(function):
        def loss(args, differentiable):
            o, lse = function(*args, **differentiable, **rest, return_residual=True)
            shown = lse if valid is None else jnp.where(valid[..., None], lse, 0.0)
            return jnp.sum(o * weight), (o, shown)

        (_, outputs), grads = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(
            args, differentiable
        )
        return jax.tree.leaves((outputs, grads))

    found, expected = run(fp.dot_product_attention), run(jax.nn.dot_product_attention)
    assert [x.shape for x in found] == [x.shape for x in expected]
    for a, b in zip(found, expected, strict=True):
        tolerance = 1e-5 if a.dtype == jnp.float32 else 1e-2
        a, b = (np.asarray(x, np.float32) for x in (a, b))
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.thorough(always=["all", "causal", "mask of padding", "window"])
@pytest.mark.parametrize("keywords", LIKE_JAX_NN.values(), ids=LIKE_JAX_NN)
def test_dot_product_attention_agrees_with_jax_nn(keywords):
    valid = None
    if "query_seq_lengths" in keywords:
        valid = keywords["query_seq_lengths"][:, None] > jnp.arange(9)[None]
    with jax.numpy_dtype_promotion("standard"):  # jax.nn itself adds a bfloat16 bias
        assert_same_as_jax_nn(inputs(2), keywords, valid)


@pytest.mark.thorough(always=["length"])
@pytest.mark.parametrize(
    "keywords",
    [
        {"is_causal": True},
        {"bias": draw(5, 4, 9, 12), "mask": mask_of(1, 4, 9, 12)},
        {"bias": draw(5, 9, 1), "key_value_seq_lengths": jnp.array([5], jnp.int32)},
    ],
    ids=["causal", "bias and mask", "length"],
)
def test_dot_product_attention_of_rank_three(keywords):
    assert_same_as_jax_nn(inputs(), keywords)


def test_where_dot_product_attention_differs_from_jax_nn():
    args = inputs(2)
    mask = jnp.ones((1, 1, 9, 12), bool).at[:, :, 4].set(False)
    ours, theirs = (
        f(*args, mask=mask) for f in (fp.dot_product_attention, jax.nn.dot_product_attention)
    )
    mean = jnp.repeat(args[2].mean(1), 2, axis=1)
    for o in (ours, theirs):
        np.testing.assert_allclose(o[:, 4], mean, rtol=1e-5, atol=1e-6)
    lse = fp.dot_product_attention(*args, mask=mask, return_residual=True)[1]
    assert jnp.isneginf(lse[:, 4]).all() and jnp.isfinite(lse[:, :4]).all()


def test_the_log_sum_exp_of_padding_next_to_sinks():
    q, _, _ = inputs(2)
    sinks, ids = jnp.arange(4.0), jnp.where(jnp.arange(q.shape[1]) < 2, 0, -1)
    ids = jnp.broadcast_to(ids, q.shape[:2])
    lse = lambda **given: fp.flash_attention_with_lse(q, q, q, sinks=sinks, **given)[1][:, :, 2:]
    padded = jnp.broadcast_to(sinks[:, None], (len(q), 4, q.shape[1] - 2))
    np.testing.assert_array_equal(lse(q_segment_ids=ids, kv_segment_ids=ids), padded)
    np.testing.assert_array_equal(lse(kv_lengths=0), padded)
    np.testing.assert_array_equal(lse(q_lengths=2), jnp.full_like(padded, -jnp.inf))


@pytest.mark.thorough
def test_what_jax_nn_takes_and_we_refuse_says_what_to_do():
    q, k, v = inputs(2)
    ours, theirs = fp.dot_product_attention, jax.nn.dot_product_attention
    scaled = lambda f: jax.jit(lambda s: f(q, k, v, scale=s))
    assert scaled(theirs)(0.3).shape == q.shape
    with pytest.raises(TypeError, match=r"scale is traced.*multiply query by it"):
        scaled(ours)(0.3)
    hessian = lambda f: jax.jacrev(jax.grad(lambda q: jnp.sum(f(q, k[:1], v[:1]))))(q[:1, :1])
    assert hessian(theirs).shape == (1, 1, 4, 16) * 2
    with pytest.raises(NotImplementedError, match="second-order"):
        hessian(ours)


@pytest.mark.thorough(always=["bfloat16"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_residual_has_the_dtype_and_no_gradient_as_in_jax_nn(dtype):
    args = [x.astype(dtype) for x in inputs(2)]

    def run(function):
        def loss(*args):
            o, lse = function(*args, return_residual=True)
            return jnp.sum(jnp.sin(o) + 3.0 * lse[..., None].astype(dtype)), lse

        return jax.grad(loss, (0, 1, 2), has_aux=True)(*args)

    grads, lse = run(fp.dot_product_attention)
    with jax.numpy_dtype_promotion("standard"):
        right, theirs = run(jax.nn.dot_product_attention)
    assert lse.dtype == theirs.dtype == dtype and lse.shape == theirs.shape
    tolerance = 1e-5 if dtype == jnp.float32 else 3e-2
    for a, b in zip((lse, *grads), (theirs, *right), strict=True):
        a, b = (np.asarray(x, np.float32) for x in (a, b))
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("length", [5, np.int64(5), jnp.int32(5)], ids=["int", "numpy", "jax"])
def test_one_length_serves_the_whole_batch(length):
    args = inputs(2)
    found = fp.dot_product_attention(*args, key_value_seq_lengths=length)
    lengths = jnp.array([5, 5], jnp.int32)
    np.testing.assert_array_equal(
        found, fp.dot_product_attention(*args, key_value_seq_lengths=lengths)
    )


@pytest.mark.parametrize("options", [{"is_causal": True}, {"local_window_size": (3, 0)}], ids=str)
def test_dot_product_attention_under_jit(options):
    """Checks that whether a query may see no key is not asked of a tracer."""
    args = inputs(2)
    call = functools.partial(fp.dot_product_attention, **options)
    np.testing.assert_allclose(jax.jit(call)(*args), call(*args), rtol=1e-6)


def test_dot_product_attention_knows_its_implementations():
    with pytest.raises(ValueError, match=r"'mosaic': choose one of 'auto'.*'cudnn'"):
        fp.dot_product_attention(*inputs(2), implementation="mosaic")


def test_importing_does_not_start_a_device():
    code = (
        "import warnings; warnings.simplefilter('error')\n"
        "import flash_pallas, jax\n"
        "from jax._src import xla_bridge\n"
        "assert not xla_bridge._backends, 'importing initialised a backend'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
