"""Puts the Flax models of transformers on flash_pallas (transformers 4.57, the last with Flax).

Example:
    >>> from flash_pallas.integrations import transformers
    >>> transformers.install("llama")  # doctest: +SKIP
"""

from __future__ import annotations

import sys
import types
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import jax
import jax.numpy as jnp

from ..api import flash_attention
from ._hooks import Client, Hook, Patch

_CLIENT = Client("transformers", "transformers", "4.57.6")
_WEIGHTS = "dot_product_attention_weights"
# Self-attention whose mask is a causal one and padding [B, S], and nothing else, and whose
# positions are indices as long as there is no cache.
_CAUSAL = frozenset(
    f"Flax{name}Attention" for name in ("GPT2", "Llama", "Mistral", "Gemma", "GPTJ")
)


def install(*models: str) -> None:
    """Makes Flax models of transformers compute attention by `flash_attention`.

    Some thirty models (https://github.com/huggingface/transformers, 4.57) call Flax's
    `dot_product_attention_weights` and multiply by the values. Both are one call here. In GPT-2,
    Llama, Mistral, Gemma and GPT-J causal masks, Mistral's window and padding become arguments as
    long as there is no cache. Everywhere else the bias that the model makes of its mask is passed
    on, [B, 1, T, S] at most. Dropout drops other weights than Flax does for the same key. A query
    that sees no key, such as padding before the first token, returns the mean of the values, as it
    does there; in those five models it has a gradient of the values alone, and there of queries and
    keys too, as they add a finite number to what they hide.

    `output_attentions=True` raises: the weights are never formed. JAX's caches are cleared,
    so that what it has compiled is traced again.

    Args:
        *models: names of folders in `transformers.models`, such as "llama"; none is all models
            whose Flax module is imported by now.

    Raises:
        ImportError: transformers is not installed, is a version without Flax models, or a model
            has none that computes attention so; no models were named and none is imported.

    Example:
        >>> from flash_pallas.integrations import transformers
        >>> transformers.install("llama", "gpt2")  # doctest: +SKIP
        >>> transformers.uninstall()
    """
    _PATCH.install(*models)


def uninstall() -> None:
    """Gives the models their own attention back; without `install` nothing happens."""
    _PATCH.uninstall()


def installed(*models: str) -> AbstractContextManager[None]:
    """Returns a context manager: `install` of the models for the body of a `with` statement."""
    return _PATCH.installed(*models)


def _hooks(*models: str) -> list[Hook]:
    linen = _CLIENT.imported("flax.linen")
    names = [f"transformers.models.{model}.modeling_flax_{model}" for model in models]
    if not names:
        names = [
            name
            for name, module in sys.modules.items()
            if ".modeling_flax_" in name and _WEIGHTS in getattr(module, "__dict__", ())
        ]
    if not names:
        raise ImportError(
            "no Flax model of transformers is imported yet: import its class first, or name the "
            'models, as in install("llama")'
        )
    found = []
    for name in names:
        module = _CLIENT.imported(name)
        _CLIENT.named(module, _WEIGHTS)
        if vars(module).get("jnp") is not jnp:
            raise _CLIENT.differs(f"has a {name} without jnp")
        ours = _Attention(linen)
        numpy = types.ModuleType("jnp")
        numpy.__dict__.update(jnp.__dict__)
        numpy.einsum = _einsum
        found += [Hook(module, _WEIGHTS, ours.weights), Hook(module, "jnp", numpy)]
        if "combine_masks" in vars(module):
            found.append(Hook(module, "combine_masks", ours.combine_masks))
    return found


_PATCH = Patch(_hooks)


class _Weights:
    """Attention weights that are never formed: what is needed to attend to values.

    Args:
        q: queries [*B, T, N, H].
        k: keys [*B, S, N, H].
        options: keywords of `flash_attention`.
        heads: factor of the output, [N, 1] at most.
    """

    def __init__(self, q: Any, k: Any, options: dict[str, Any], heads: Any = 1):
        self.q, self.k, self.options, self.heads = q, k, options, heads

    def astype(self, dtype: Any) -> _Weights:
        """Returns itself: the weights are never rounded to another dtype."""
        return self

    def scaled(self, heads: Any) -> _Weights:
        """Returns weights multiplied by a factor for each head, [N] or [B, N]."""
        return _Weights(self.q, self.k, self.options, self.heads * heads[..., None])

    def of(self, v: Any) -> Any:
        """Returns the output [*B, T, N, Hv] for values [*B, S, N, Hv]."""
        dtype = jnp.result_type(self.q, self.k, v)
        q, k, values = (x.astype(dtype) for x in (self.q, self.k, v))
        o = flash_attention(q, k, values, empty_rows="mean", **self.options)
        return (o * self.heads).astype(v.dtype)

    def __getattr__(self, name: str) -> NoReturn:
        _refuse()

    def __array__(self, *_, **__) -> NoReturn:
        _refuse()

    def __getitem__(self, index: Any) -> NoReturn:
        _refuse()

    def __len__(self) -> NoReturn:
        _refuse()


def _refuse(*_) -> NoReturn:
    raise NotImplementedError(
        "output_attentions=True asks for the attention weights, which flash_pallas never forms: "
        "call flash_pallas.integrations.transformers.uninstall() to look at them"
    )


# Under jit the weights would be an output; this makes that the same message.
jax.tree_util.register_pytree_node(_Weights, _refuse, _refuse)


def _einsum(subscripts: Any, first: Any, *rest: Any, **options: Any) -> Any:
    """Computes `jnp.einsum`, and attention where the first operand stands for its weights."""
    if not isinstance(first, _Weights):
        return jnp.einsum(subscripts, first, *rest, **options)
    (other,) = rest
    if subscripts == "...hqk,h->...hqk":
        return first.scaled(other)
    if subscripts == "...hqk,...khd->...qhd":
        return first.of(other)
    raise NotImplementedError(
        f"the model computes einsum({subscripts!r}) of attention weights, which flash_pallas never "
        "forms: leave this model out of install(...)"
    )


class _Attention:
    """The functions that one module of transformers gets.

    Args:
        linen: module flax.linen.
    """

    def __init__(self, linen: Any):
        self._linen = linen
        self._combined: tuple[Any, Any] = (None, None)  # layer and its padding [B, 1, T, S]

    def _layer(self) -> Any:
        """Returns the Flax module whose method runs."""
        return self._linen.module._context.module_stack[-1]

    def combine_masks(self, *masks: Any, **options: Any) -> Any:
        """Combines masks as Flax does, and remembers the first, which is padding."""
        self._combined = (self._layer(), masks[0])
        return self._linen.combine_masks(*masks, **options)

    def weights(
        self,
        query: Any,
        key: Any,
        bias: Any = None,
        mask: Any = None,
        broadcast_dropout: bool = True,
        dropout_rng: Any = None,
        dropout_rate: float = 0.0,
        **options: Any,
    ) -> _Weights:
        """Returns what stands for the weights of Flax's function of these arguments."""
        # No model passes another one; `dtype` is of the softmax, which is never below float32.
        known = {"deterministic", "dtype", "precision", "module"}
        given = {name for name, x in options.items() if x is not None}
        if unknown := given - known or given & {"module"}:
            raise NotImplementedError(
                f"{_WEIGHTS} got {', '.join(sorted(unknown))}, which flash_pallas has not: leave "
                "this model out of install(...)"
            )
        found = self._structured(query, key)
        if found is None:
            rank = max(query.ndim, 4)
            found = {"bias": _ranked(bias, rank)}
            if mask is not None:
                found["mask"] = _ranked(mask, rank).astype(bool)
        found |= {"q_offset": 0, "precision": options.get("precision")}
        if not options.get("deterministic") and dropout_rate > 0:
            found |= {"dropout_rate": float(dropout_rate), "dropout_seed": dropout_rng}
            found["broadcast_dropout"] = broadcast_dropout
        return _Weights(query, key, found)

    def _structured(self, query: Any, key: Any) -> dict[str, Any] | None:
        """Returns the masks as keywords of `flash_attention`, None if the bias must say them."""
        layer, (combined, padding) = self._layer(), self._combined
        self._combined = (None, None)
        if combined is not layer or type(layer).__name__ not in _CAUSAL:
            return None
        cached = layer.has_variable("cache", "cached_key")
        if cached or query.shape[-3] != key.shape[-3] or not getattr(layer, "causal", True):
            return None
        found: dict[str, Any] = {"causal": True}
        if type(layer).__name__ == "FlaxMistralAttention":
            # The mask of their Flax model keeps sliding_window tokens before the query, one more
            # than their torch model does, and none without a sliding_window.
            found["window"] = (layer.config.sliding_window or 0, 0)
        return found | {
            "mask": padding[:, :1, :1].astype(bool)
        }  # [B, 1, 1, S]: the same for all queries


def _ranked(x: Any, rank: int) -> Any:
    """Returns an array with axes of 1 in front, up to the rank."""
    return x if x is None else x.reshape((1,) * (rank - x.ndim) + x.shape)
