"""`equinox.nn.MultiheadAttention` and its copy on flash_pallas, in one model."""

from __future__ import annotations

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from flash_pallas.integrations import equinox as integration

from . import parity

T, WIDTH, HEADS = 48, 64, 4
CAUSAL = jnp.tril(jnp.ones((T, T), bool))


class Block(eqx.Module):
    """One layer of a transformer with rotary positions."""

    attention: eqx.nn.MultiheadAttention
    norm: eqx.nn.LayerNorm
    mlp: eqx.nn.MLP
    rope: eqx.nn.RotaryPositionalEmbedding

    def __init__(self, key, dropout=0.0):
        a, b = jax.random.split(key)
        self.attention = eqx.nn.MultiheadAttention(HEADS, WIDTH, dropout_p=dropout, key=a)
        self.norm = eqx.nn.LayerNorm(WIDTH)
        self.mlp = eqx.nn.MLP(WIDTH, WIDTH, 2 * WIDTH, 1, key=b)
        self.rope = eqx.nn.RotaryPositionalEmbedding(WIDTH // HEADS)

    def rotate(self, q, k, v):
        return jax.vmap(self.rope, 1, 1)(q), jax.vmap(self.rope, 1, 1)(k), v

    def __call__(self, x, mask=None, key=None):
        h = jax.vmap(self.norm)(x)
        attend = functools.partial(self.attention, process_heads=self.rotate)
        x = x + attend(h, h, h, mask, key=key, inference=key is None)
        return x + jax.vmap(self.mlp)(x)


def gradient(model, x, mask=None):
    loss = lambda model: (jax.vmap(lambda y: model(y, mask))(x) ** 2).mean()
    return eqx.filter_jit(eqx.filter_value_and_grad(loss))(model)


@pytest.mark.parametrize("case", ["causal", "window", "mask", "mask of heads", "empty rows"])
def test_loss_and_gradients(case):
    model, x = Block(jax.random.key(0)), parity.normal(1, 3, T, WIDTH)
    options, mask, given = {}, CAUSAL, None
    if case == "causal":
        options = {"causal": True}
    elif case == "window":
        options = {"causal": True, "window": (7, 0)}
        mask = CAUSAL & ~jnp.tril(CAUSAL, -8)
    elif case == "mask":
        given = mask
    elif case == "mask of heads":
        given = mask = jnp.stack([jnp.tril(CAUSAL, -n) | jnp.eye(T, dtype=bool) for n in range(4)])
    else:
        given = mask = CAUSAL & (jnp.arange(T) > 4)
    flash = integration.to_flash(model, **options)
    parity.compare(case, gradient(model, x, mask), gradient(flash, x, given))


def test_training():
    x, y = parity.normal(2, 4, T, WIDTH), parity.normal(3, 4, T, WIDTH)
    optimizer = optax.sgd(0.03, momentum=0.9)

    def losses(model, mask):
        @eqx.filter_jit
        def step(model, state):
            loss = lambda model: ((jax.vmap(lambda z: model(z, mask))(x) - y) ** 2).mean()
            value, grads = eqx.filter_value_and_grad(loss)(model)
            updates, state = optimizer.update(grads, state)
            return eqx.apply_updates(model, updates), state, value

        state, found = optimizer.init(eqx.filter(model, eqx.is_array)), []
        for _ in range(50):
            model, state, value = step(model, state)
            found.append(float(value))
        return found

    model = Block(jax.random.key(0))
    flash = integration.to_flash(model, causal=True)
    parity.curves("causal", losses(model, CAUSAL), losses(flash, None))


def test_masks_are_arguments(monkeypatch):
    seen = parity.calls(monkeypatch, integration)
    integration.to_flash(Block(jax.random.key(0)), causal=True, window=(7, 0))(
        parity.normal(1, T, WIDTH)
    )
    (call,) = seen
    assert call["causal"] is True and call["window"] == (7, 0) and call["mask"] is None


def test_forward_mode_where_it_is_asked_for():
    x, dx = parity.normal(1, T, WIDTH), parity.normal(2, T, WIDTH)
    model = Block(jax.random.key(0))
    found, wanted = (
        jax.jvp(lambda x, m=m, mask=mask: m(x, mask), (x,), (dx,))[1]
        for m, mask in (
            (integration.to_flash(model, causal=True, differentiable="any"), None),
            (model, CAUSAL),
        )
    )
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4)
    with pytest.raises(ValueError, match="key_ has length 3 and value length 48"):
        integration.to_flash(model).attention(x, x[:3], x)


def test_dropout_keeps_the_mean_and_needs_a_key():
    layer = eqx.nn.MultiheadAttention(2, 8, dropout_p=0.3, key=jax.random.key(0))
    flash, x = integration.to_flash(layer), parity.normal(1, 6, 8)
    keys = jax.random.split(jax.random.key(3), 2000)
    found = np.asarray(eqx.filter_jit(jax.vmap(lambda key: flash(x, x, x, key=key)))(keys))
    spread = found.std(0) / np.sqrt(len(keys))
    # A mean of 2000 draws is a normal number; 6 of its spread are one in 5e8.
    assert (np.abs(found.mean(0) - layer(x, x, x, inference=True)) <= 6 * spread).all()
    assert (spread > 0).all()
    with pytest.raises(ValueError, match="inference=True"):
        flash(x, x, x)


def test_the_rest_of_a_model_stays():
    model = {"layers": [Block(jax.random.key(0)), Block(jax.random.key(1))], "scale": 2.0}
    flash = integration.to_flash(model, causal=True)
    assert jax.tree.leaves(eqx.filter(flash, eqx.is_array)) == jax.tree.leaves(
        eqx.filter(model, eqx.is_array)
    )
    assert flash["layers"][1].attention.causal and flash["scale"] == 2.0
    again = integration.to_flash(flash)
    assert not again["layers"][0].attention.causal


def test_heads_that_change_shape_are_refused():
    layer = integration.to_flash(eqx.nn.MultiheadAttention(2, 8, key=jax.random.key(0)))
    with pytest.raises(ValueError, match="process_heads changed the shapes"):
        x = parity.normal(0, 4, 8)
        layer(x, x, x, process_heads=lambda q, k, v: (q[:2], k, v))


def test_another_equinox_is_refused(monkeypatch):
    integration._layer.cache_clear()
    monkeypatch.setattr(integration, "_FIELDS", ("query_proj",))
    with pytest.raises(ImportError, match=r"equinox 0[.]\S+ has a layer with the fields"):
        integration.to_flash({})
    integration._layer.cache_clear()


def test_the_page():
    parity.run_the_page("equinox")
