"""Keras's layers and functions with its own attention and with flash_pallas."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

from flash_pallas.integrations import keras as integration

from . import parity

T, WIDTH = 40, 64
LENGTHS = np.array([40, 31, 7])
PADDING = np.arange(T)[None] < LENGTHS[:, None]


@pytest.fixture(autouse=True)
def uninstalled():
    """Keras as it was, whatever a test leaves behind."""
    yield
    integration.uninstall()


def layer_of(kind, **options):
    if kind == "grouped":
        return keras.layers.GroupQueryAttention(16, 4, 2, **options)
    return keras.layers.MultiHeadAttention(4, 16, **options)


def network(kind, options, call):
    """Returns two layers of attention on padded inputs, of the same weights every time."""
    keras.utils.set_random_seed(0)
    x, padding = keras.Input((T, WIDTH)), keras.Input((T,), dtype="bool")
    masks = {"query_mask": padding, "value_mask": padding} if call.pop("padded", False) else {}
    h = x
    for _ in range(2):
        attended = Masked(layer_of(kind, **options), dict(call))(h, *masks.values())
        h = keras.layers.LayerNormalization()(h + attended)
    return keras.Model([x, padding], keras.layers.Dense(8)(h))


class Masked(keras.layers.Layer):
    """A layer of attention whose masks are inputs of a model."""

    def __init__(self, layer, call):
        super().__init__()
        self.layer, self.options = layer, call

    def build(self, shape, *masks):
        self.layer.build(shape, shape)

    def call(self, x, queries=None, keys=None, training=None):
        masks = {} if queries is None else {"query_mask": queries, "value_mask": keys}
        if "query_mask" in masks:
            # MultiHeadAttention reads the query's mask from the array itself.
            keras.src.backend.set_keras_mask(x, masks.pop("query_mask"))
        return self.layer(x, x, training=training, **masks, **self.options)


def gradient(model, train=False):
    x, y = parity.normal(0, 3, T, WIDTH), parity.normal(1, 3, T, 8)

    def loss(variables):
        o, _ = model.stateless_call(
            variables, model.non_trainable_variables, [x, PADDING], training=train
        )
        return ((o - y) ** 2).mean()  # of padding too: its rows are Keras's as well

    names = [f"{index} {v.path}" for index, v in enumerate(model.trainable_variables)]
    value, grads = jax.jit(jax.value_and_grad(loss))([v.value for v in model.trainable_variables])
    return value, dict(zip(names, grads, strict=True))


CASES = {
    "causal": ("heads", {}, {"use_causal_mask": True}),
    "GQA, causal": ("grouped", {}, {"use_causal_mask": True}),
    "padding": ("heads", {}, {"padded": True}),
    "padding, causal": ("heads", {}, {"padded": True, "use_causal_mask": True}),
    "GQA, padding, causal": ("grouped", {}, {"padded": True, "use_causal_mask": True}),
    "window, causal": ("heads", {"sliding_window": 9}, {"use_causal_mask": True}),
    "GQA, window": ("grouped", {"sliding_window": 9}, {"padded": True}),
    "mask": ("heads", {}, {"attention_mask": jnp.arange(T)[None, None] % 3 > 0}),
    "gate": ("heads", {"use_gate": True}, {"use_causal_mask": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients(case, monkeypatch):
    kind, options, call = CASES[case]
    theirs = gradient(network(kind, options, dict(call)))
    seen = parity.calls(monkeypatch, integration)
    with integration.installed():
        ours = gradient(network(kind, options, dict(call)))
    parity.compare(case, theirs, ours)
    assert len(seen) >= 2
    for found in seen:  # masks of Keras are arguments, the caller's own is an array
        assert ("mask" in found) == (case == "mask")
        assert found["causal"] == ("causal" in case or case == "gate")
        assert found.get("window") == (8 if "window" in case else None)
        assert ("kv_segment_ids" in found) == bool(call.get("padded"))


def test_training():
    def losses():
        model = network("heads", {}, {"use_causal_mask": True, "padded": True})
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
        inputs = [np.asarray(parity.normal(0, 3, T, WIDTH)), PADDING]
        y = np.asarray(parity.normal(1, 3, T, 8))
        options = {"epochs": 50, "batch_size": 3, "shuffle": False, "verbose": 0}
        return [float(x) for x in model.fit(inputs, y, **options).history["loss"]]

    theirs = losses()
    with integration.installed():
        ours = losses()
    parity.curves("MultiHeadAttention, causal, padded, fit", theirs, ours)


def test_the_function():
    q, k, v = (parity.normal(seed, 2, 12, 4, 16) for seed in range(3))
    mask = jnp.tril(jnp.ones((12, 12), bool), -1)[None, None]  # the first query sees nothing
    options = {"bias": parity.normal(4, 1, 4, 12, 12), "mask": mask, "scale": 0.3}
    theirs = keras.ops.dot_product_attention(q, k, v, **options)
    with integration.installed():
        ours = keras.ops.dot_product_attention(q, k, v, **options)
    assert parity.difference(ours, theirs) <= parity.BOUND


def test_the_soft_cap_is_honored_or_refused():
    q = parity.normal(0, 1, 8, 2, 16) * 3
    # keras.ops refuses a soft cap but on TPU, and Keras's own function drops it.
    call = lambda **options: keras.src.backend.nn.dot_product_attention(
        q, q, q, attn_logits_soft_cap=2.0, **options
    )
    scores = jnp.einsum("btnh,bsnh->bnts", q, q) / 4
    wanted = jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(2 * jnp.tanh(scores / 2)), q)
    with integration.installed():
        assert parity.difference(call(), wanted) <= parity.BOUND
        with pytest.raises(NotImplementedError, match="attn_logits_soft_cap"):
            call(flash_attention=False)


def test_inputs_of_another_rank_are_refused():
    q = parity.normal(0, 8, 2, 16)
    with integration.installed(), pytest.raises(ValueError, match="batch, length, heads"):
        keras.src.backend.nn.dot_product_attention(q, q, q)


def test_attention_scores_are_keras_own():
    layer, x = layer_of("heads"), parity.normal(0, 2, 8, WIDTH)
    wanted = layer(x, x, use_causal_mask=True, return_attention_scores=True)
    with integration.installed():
        found = layer(x, x, use_causal_mask=True, return_attention_scores=True)
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(a, b)


def test_dropout_keeps_the_mean():
    layer, x = layer_of("heads", dropout=0.3), parity.normal(0, 1, 6, WIDTH)
    wanted = layer(x, x, training=False)
    many = jnp.broadcast_to(x, (2000, 6, WIDTH))
    with integration.installed():
        found = np.asarray(layer(many, many, training=True))
        assert parity.difference(layer(x, x, training=False), wanted) <= parity.BOUND
    spread = found.std(0) / np.sqrt(len(found))
    assert (spread > 0).all() and (np.abs(found.mean(0) - wanted[0]) <= 6 * spread).all()


def test_a_layer_with_attention_of_its_own_gets_the_array():
    class Own(keras.layers.MultiHeadAttention):
        def _compute_attention(self, query, key, value, attention_mask=None, *_, **__):
            assert attention_mask.shape == (1, 8, 8)
            return value, None

    with integration.installed():
        x = parity.normal(0, 1, 8, WIDTH)
        assert Own(4, 16)(x, x, use_causal_mask=True).shape == (1, 8, WIDTH)


def test_everything_is_put_back():
    layer = keras.layers.MultiHeadAttention
    hooks = lambda: (
        keras.src.backend.nn.dot_product_attention,
        layer._compute_attention,
        layer._compute_attention_mask,
    )
    before = hooks()
    integration.install()
    integration.install()
    assert all(a is not b for a, b in zip(hooks(), before, strict=True))
    integration.uninstall()
    integration.uninstall()
    assert hooks() == before
    with pytest.raises(ZeroDivisionError), integration.installed():
        raise ZeroDivisionError
    assert hooks() == before


def test_another_keras_is_refused(monkeypatch):
    monkeypatch.setattr(keras.src.backend.nn, "dot_product_attention", lambda q, k, v: q)
    with pytest.raises(ImportError, match=r"was tested with keras 3[.]15[.]1; keras \S+ has"):
        integration.install()


def test_the_page():
    parity.run_the_page("keras")
