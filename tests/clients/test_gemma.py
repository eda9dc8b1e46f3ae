"""Gemma 2, 3 and 4 with their own attention and with flash_pallas."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from gemma.gm.nn import _config, _modules, _transformer
from gemma.gm.nn.gemma4 import _config as config_4
from gemma.gm.nn.gemma4 import _modules as modules_4
from gemma.gm.nn.gemma4 import _transformer as transformer_4

from flash_pallas.integrations import gemma as integration

from . import parity

GLOBAL, LOCAL = _modules.AttentionType.GLOBAL, _modules.AttentionType.LOCAL_SLIDING
SIZES = {
    "num_embed": 128, "embed_dim": 48, "hidden_dim": 96, "num_heads": 4, "head_dim": 16,
    "use_post_attn_norm": True, "use_post_ffw_norm": True, "sliding_window_size": 8,
}  # fmt: skip
TOKENS = jax.random.randint(jax.random.key(0), (2, 33), 1, 128).at[1, 25:].set(0)  # 0 is padding
LEFT = TOKENS[:, ::-1]


@pytest.fixture(autouse=True)
def uninstalled():
    """Gemma as it was, whatever a test leaves behind."""
    yield
    integration.uninstall()


def model_of(name):
    if name == "gemma 4":
        kinds = modules_4.AttentionType
        config = config_4.TransformerConfig(
            **SIZES, num_kv_heads=1, num_global_kv_heads=2, global_key_size=32, k_eq_v_global=True,
            local_rope_proportion=1.0, global_rope_proportion=0.25,
            final_logit_softcap=None, attention_types=(kinds.LOCAL_SLIDING, kinds.GLOBAL),
        )  # fmt: skip
        return transformer_4.Transformer(config=config, dtype=jnp.float32)
    if name == "gemma 2":
        own = {"num_kv_heads": 2, "final_logit_softcap": 30.0, "attn_logits_soft_cap": 50.0}
    else:
        own = {"num_kv_heads": 1, "final_logit_softcap": None, "use_qk_norm": True}
    config = _config.TransformerConfig(**SIZES, **own, attention_types=(LOCAL, GLOBAL))
    return _transformer.Transformer(config=config, dtype=jnp.float32)


def gradient(model, params, tokens, **options):
    def loss(params):
        logits = model.apply(params, tokens, **options).logits
        losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:])
        return (losses * (tokens[:, 1:] != 0)).mean()

    return jax.jit(jax.value_and_grad(loss))(params)


def quieter(params):
    """Returns parameters with a quarter of the norms of queries and keys: logits of 1, not 16.

    At initialization Gemma 4 has logits of 16, as its scale is 1, and its own gradients differ by
    2.2e-6 between XLA with and without optimizations; with logits of 4 by 6.7e-7.
    """
    norms = "query_norm", "key_norm"
    return jax.tree_util.tree_map_with_path(
        lambda path, x: x - 0.75 if any(n in jax.tree_util.keystr(path) for n in norms) else x,
        params,
    )


@pytest.mark.parametrize("padding", ["right", "left"])
@pytest.mark.parametrize("name", ["gemma 2", "gemma 3", "gemma 4"])
def test_loss_and_gradients(name, padding, monkeypatch):
    model, tokens = model_of(name), TOKENS if padding == "right" else LEFT
    params = model.init(jax.random.key(1), tokens)
    if name == "gemma 4":  # its scale is 1: see `quieter`
        params = quieter(params)
    theirs = gradient(model, params, tokens)
    seen = parity.calls(monkeypatch, integration)
    with integration.installed():
        ours = gradient(model, params, tokens)
    parity.compare(f"{name}, padding on the {padding}", theirs, ours)
    for call in seen:  # no mask of [B, L, L]
        assert call["causal"] is True and call["mask"].shape == (2, 1, 1, 33)
    assert {call.get("window") for call in seen} == {(7, 7), None}


def test_masks_and_positions_of_the_caller(monkeypatch):
    model = model_of("gemma 3")
    params = model.init(jax.random.key(1), TOKENS)
    prefix = jnp.tril(jnp.ones((33, 33), bool)).at[:10, :10].set(True)[None].repeat(2, 0)
    backwards = jnp.arange(33)[None, ::-1].repeat(2, 0)
    for options in ({"attention_mask": prefix}, {"positions": backwards}):
        theirs = gradient(model, params, TOKENS, **options)
        seen = parity.calls(monkeypatch, integration)
        with integration.installed():
            ours = gradient(model, params, TOKENS, **options)
        parity.compare(f"gemma 3, own {next(iter(options))}", theirs, ours)
        assert any(call["mask"].shape == (2, 1, 33, 33) for call in seen)


@pytest.mark.parametrize("name", ["gemma 2", "gemma 4"])
def test_a_cache(name):
    """Compares a prefill of 20 tokens and three steps, each with the sampler's kind of mask."""
    model, columns = model_of(name), jnp.arange(40)
    params = model.init(jax.random.key(1), TOKENS)

    def run():
        cache = model.config.init_cache(batch_size=2, dtype=jnp.float32, cache_length=40)

        @jax.jit
        def step(tokens, positions, cache, mask):
            out = model.apply(params, tokens, positions=positions, cache=cache, attention_mask=mask)
            return out.logits, out.cache

        rows = jnp.arange(20)
        mask = (columns <= rows[:, None])[None].repeat(2, 0)
        logits, cache = step(TOKENS[:, :20], rows[None].repeat(2, 0), cache, mask)
        found = [logits]
        for t in range(20, 23):
            mask = (columns <= t)[None, None].repeat(2, 0)
            logits, cache = step(TOKENS[:, t : t + 1], jnp.full((2, 1), t), cache, mask)
            found.append(logits)
        return found

    theirs = run()
    with integration.installed():
        ours = run()
    for a, b in zip(ours, theirs, strict=True):
        assert parity.difference(a, b) <= 2 * parity.BOUND  # logits of both layers' errors


def test_everything_is_put_back():
    names = [(_modules.Attention, "__call__"), (modules_4.Attention, "__call__")]
    before = [vars(owner)[name] for owner, name in names]
    integration.install()
    assert all(vars(o)[n] is not old for (o, n), old in zip(names, before, strict=True))
    integration.uninstall()
    assert [vars(owner)[name] for owner, name in names] == before


def test_a_window_without_a_size_is_refused():
    layer = _modules.Attention(
        num_heads=1, num_kv_heads=1, features=8, head_dim=8, attn_type=LOCAL,
        query_pre_attn_scalar=1.0,
    )  # fmt: skip
    arguments = jnp.ones((1, 4, 8)), jnp.arange(4)[None], None, np.ones((1, 4, 4), bool)
    with integration.installed(), pytest.raises(ValueError, match="sliding_window_size is None"):
        layer.init(jax.random.key(0), *arguments)


def test_another_gemma_is_refused(monkeypatch):
    monkeypatch.setattr(_modules.Attention, "__call__", lambda self, x: x)
    with pytest.raises(ImportError, match=r"was tested with gemma 4[.]0[.]1; gemma \S+ has"):
        integration.install()


def test_the_page():
    parity.run_the_page("gemma")
