"""Runs the Flax models of transformers on flash_pallas (transformers 4.57, the last with Flax).

About thirty modules call `dot_product_attention_weights` and multiply the weights by the values
with `jnp.einsum`. Here the first function only returns its arguments, and `jnp.einsum` then
computes attention. Before that, a module makes a causal mask, combines it with padding and turns it
into a bias of 0 and -3e38. Here each of these steps keeps the meaning of the mask, and no array of
T * S numbers is formed.

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
from ..frontend.words import LONG_NAMES, Words
from ..typing import Differentiable
from ._hooks import Client, Hook, Patch
from ._visible import Visible

_CLIENT = Client("transformers", "transformers", "4.57.6")
# What it calls the arguments of `flash_attention`.
WORDS = Words(
    {
        **LONG_NAMES,
        "dropout_seed": "dropout_rng",
    }
)
_WEIGHTS = "dot_product_attention_weights"
_UNKNOWN = "which flash_pallas has not: leave this model out of install(...)"


def install(*models: str, differentiable: Differentiable = "reverse") -> None:
    """Makes Flax models of transformers compute attention by `flash_attention`.

    About thirty models (https://github.com/huggingface/transformers, 4.57) call Flax's
    `dot_product_attention_weights` and multiply the result by the values. Here both become one
    call. Causal masks, Mistral's window, padding and the filled part of a cache become arguments,
    so no array of [B, T, S] is formed. A position bias such as T5's remains an array [1, N, T, S],
    and the mask of GPT-Neo's local layers remains an array [1, 1, T, S]. For the same key, dropout
    drops different weights than in Flax. A query that sees no key, such as padding before the first
    token, returns the mean of the values, as in transformers. Here it has a gradient only for the
    values. In transformers it also has one for queries and keys, because these models add a finite
    number to hidden scores.

    `output_attentions=True` raises an error, because the weights are never formed. JAX's caches are
    cleared, so that compiled functions are traced again.

    Args:
        *models: names of folders in `transformers.models`, such as "llama". Without names, it
            applies to all models whose Flax module has been imported.
        differentiable: "reverse", or "any" for forward mode and derivatives of every order, as in
            `flash_attention`.

    Raises:
        ImportError: transformers is not installed, or is a version without Flax models; a named
            model has no Flax module that computes attention in this way; or no models were named
            and none is imported.

    Example:
        >>> from flash_pallas.integrations import transformers
        >>> transformers.install("llama", "gpt2")  # doctest: +SKIP
        >>> transformers.uninstall()
    """
    _PATCH.install(*models, differentiable=differentiable)


def uninstall() -> None:
    """Restores the models' own attention. Without `install` nothing happens."""
    _PATCH.uninstall()


def installed(
    *models: str, differentiable: Differentiable = "reverse"
) -> AbstractContextManager[None]:
    """Returns a context manager that runs `install` of the models for the body of a `with`."""
    return _PATCH.installed(*models, differentiable=differentiable)


def _hooks(*models: str) -> list[Hook]:
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
    hooks = []
    for name in names:
        module = _CLIENT.imported(name)
        _CLIENT.named(module, _WEIGHTS)
        if vars(module).get("jnp") is not jnp:
            raise _CLIENT.differs(f"has a {name} without jnp")
        hooks.append(Hook(module, _WEIGHTS, _weights))
        hooks += [Hook(module, name, new) for name, new in _STEPS.items() if hasattr(module, name)]
    return hooks


_PATCH = Patch(_hooks)


@jax.tree_util.register_pytree_node_class
class _Structured:
    """A mask or bias of transformers, [B, N, T, S], kept as what it means.

    Args:
        shape: of the array that transformers would have.
        visible: what it leaves visible.
        bias: what is added besides, None for nothing.
        is_bias: whether a mask has become the bias that hides the same.
    """

    ndim = 4

    def __init__(self, shape: Any, visible: Visible, bias: Any = None, is_bias: bool = False):
        self.shape, self.visible = tuple(shape), visible
        self.bias, self.is_bias = bias, is_bias
        self.dtype = jnp.dtype(jnp.float32 if is_bias else bool)

    def tree_flatten(self):
        """Returns (arrays, static fields), so that it passes through jit and remat."""
        x = self.visible
        arrays = x.q_offset, x.kv_valid, x.mask, self.bias
        return arrays, (self.shape, x.causal, x.window, self.is_bias)

    @classmethod
    def tree_unflatten(cls, rest, arrays):
        """Makes an instance from what `tree_flatten` returned."""
        shape, causal, window, is_bias = rest
        return cls(shape, Visible(causal, window, *arrays[:3]), arrays[3], is_bias)

    def __getitem__(self, index: Any) -> Any:
        """Returns leading queries and keys, as modules take of a mask for the longest input."""
        full_slice = slice(None)
        if isinstance(index, tuple) and len(index) == 4 and index[:2] == (full_slice, full_slice):
            rows, columns = index[2:]
            leading = all(isinstance(x, slice) and not x.start and not x.step for x in index)
            if leading and self.visible.mask is None:
                shape = (*self.shape[:2], rows.stop, columns.stop)
                return _Structured(shape, self.visible)
        return self._dense()[index]

    def __gt__(self, other: Any) -> _Structured:
        """Returns itself: modules ask for mask > 0."""
        return self

    def __xor__(self, other: Any) -> Any:
        return self._dense() ^ other

    def __add__(self, other: Any) -> _Structured:
        """Returns the sum with a position bias, or with what another mask has become."""
        visible, bias = self.visible, other
        if isinstance(other, _Structured):
            visible, bias = visible & other.visible, other.bias
        if self.bias is not None:
            bias = self.bias if bias is None else self.bias + bias
        shape = jnp.broadcast_shapes(self.shape, other.shape)
        return _Structured(shape, visible, bias, is_bias=True)

    # For jax array + this object. As long as it has no __jax_array__, jax leaves the sum to it.
    __radd__ = __add__

    def astype(self, dtype: Any) -> _Structured:
        """Returns itself: it has no numbers."""
        return self

    def _dense(self) -> Any:
        """Returns the array, for steps that nobody foresaw."""
        visible = jnp.broadcast_to(self.visible.dense(*self.shape[2:]), self.shape)
        if not self.is_bias:
            return visible
        hidden = jnp.where(visible, 0.0, jnp.finfo(jnp.float32).min)
        return hidden if self.bias is None else self.bias + hidden


def _is_padding(x: Any) -> bool:
    """Returns whether an array is a mask of keys alone, [B, 1, 1, S]."""
    return x.ndim == 4 and x.shape[1] == x.shape[2] == 1


def _visible_of(mask: Any) -> Visible:
    if isinstance(mask, _Structured):
        return mask.visible
    mask = jnp.asarray(mask).astype(bool)
    return Visible(kv_valid=mask[:, 0, 0]) if _is_padding(mask) else Visible(mask=mask)


def _make_causal_mask(x, extra_batch_dims=0, dtype=None):
    if extra_batch_dims:
        raise NotImplementedError(f"make_causal_mask got extra_batch_dims, {_UNKNOWN}")
    return _Structured((x.shape[0], 1, x.shape[-1], x.shape[-1]), Visible(causal=True))


def _combine_masks(*masks, dtype=jnp.float32):
    masks = [mask for mask in masks if mask is not None]
    if not masks or any(mask.ndim != 4 for mask in masks):
        return _CLIENT.imported("flax.linen").combine_masks(*masks, dtype=dtype)
    visible = Visible()
    for mask in masks:
        visible = visible & _visible_of(mask)
    return _Structured(jnp.broadcast_shapes(*(mask.shape for mask in masks)), visible)


def _broadcast_to(x, shape, **options):
    if isinstance(x, _Structured):
        return _Structured(shape, x.visible, x.bias, x.is_bias)
    if len(shape) == 4 and x.dtype == bool and x.shape == shape[3:]:
        return x[None, None, None]  # the filled part of a cache, on its way to combine_masks
    if len(shape) == 4 and _is_padding(x) and x.shape[3] == shape[3]:
        return x  # padding, likewise: it need not be repeated
    if x.dtype == bool and x.shape == (1, *shape[1:]):
        return x  # a mask that is the same for the batch, likewise
    return jnp.broadcast_to(x, shape, **options)


def _triu(x, k=0):
    if isinstance(x, _Structured) and k <= 0:
        return _Structured(x.shape, x.visible & Visible(window=(-k, None)))
    return _written_out(jnp.triu)(x, k=k)


def _dynamic_slice(x, start, sizes):
    if not isinstance(x, _Structured):
        return jax.lax.dynamic_slice(x, start, sizes)
    return _Structured(sizes, x.visible & Visible(q_offset=start[2]))


def _select(which, on_true, on_false):
    """Computes `lax.select`; of a mask of attention, 0 or the least number, it is a bias."""
    if isinstance(which, _Structured) or _is_padding(which):
        return _Structured(which.shape, _visible_of(which), is_bias=True)
    return jax.lax.select(which, on_true, on_false)


def _zeros_like(x, **options):
    if isinstance(x, _Structured):
        return _Structured(x.shape, Visible(), is_bias=True)
    return jnp.zeros_like(x, **options)


def _written_out(function):
    """Returns a function that gets masks as arrays, for steps that are not known here."""

    def call(*args, **options):
        args = (x._dense() if isinstance(x, _Structured) else x for x in args)
        return function(*args, **options)

    return call


def _clip(x, *args, a_min=None, a_max=None, **options):
    """Computes `jnp.clip`, by which T5 names a_max: jax has no such argument any more."""
    for name, bound in (("min", a_min), ("max", a_max)):
        if bound is not None:
            options[name] = bound
    return jnp.clip(x, *args, **options)


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

    @WORDS
    def of(self, v: Any) -> Any:
        """Returns the output [*B, T, N, Hv] for values [*B, S, N, Hv]."""
        dtype = jnp.result_type(self.q, self.k, v)
        # debug_nans finds the NaN of padding at a conversion, even at one that changes nothing.
        arrays = self.q, self.k, v
        q, k, values = (x if x.dtype == dtype else x.astype(dtype) for x in arrays)
        options = {"empty_rows": "mean", "differentiable": _PATCH.differentiable}
        o = flash_attention(q, k, values, **options, **self.options)
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


# As an output of jit the weights are flattened, which raises the same error.
jax.tree_util.register_pytree_node(_Weights, _refuse, _refuse)


def _weights(
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
    # No model passes others. `dtype` is that of the softmax, which is float32 or wider here.
    known = {"deterministic", "dtype", "precision"}
    in_use = {name for name, x in options.items() if x is not None and x is not False}
    if unknown := in_use - known:
        raise NotImplementedError(f"{_WEIGHTS} got {', '.join(sorted(unknown))}, {_UNKNOWN}")
    visible = Visible()
    if isinstance(bias, _Structured):
        visible, bias = bias.visible, bias.bias
    if mask is not None:
        visible = visible & _visible_of(mask)
    keywords = visible.options(query.shape[0], query.shape[1], key.shape[1])
    keywords |= {"bias": bias, "precision": options.get("precision")}
    if not options.get("deterministic") and dropout_rate > 0:
        keywords |= {"dropout_rate": float(dropout_rate), "dropout_seed": dropout_rng}
        keywords["broadcast_dropout"] = broadcast_dropout
    return _Weights(query, key, keywords)


def _einsum(subscripts: Any, first: Any, *rest: Any, **options: Any) -> Any:
    """Computes `jnp.einsum`, and attention where the first operand stands for its weights."""
    if not isinstance(first, _Weights):
        return jnp.einsum(subscripts, first, *rest, **options)
    (other,) = rest
    if subscripts == "...hqk,h->...hqk":
        return first.scaled(other)
    if subscripts == "...hqk,...khd->...qhd":
        return first.of(other)
    raise NotImplementedError(f"einsum({subscripts!r}) of attention weights, {_UNKNOWN}")


def _with(module: Any, name: str, **attributes: Any) -> types.ModuleType:
    """Returns a copy of a module with some other attributes."""
    replaced = types.ModuleType(name)
    replaced.__dict__.update(module.__dict__)
    replaced.__dict__.update(attributes, __getattr__=lambda attribute: getattr(module, attribute))
    return replaced


_JNP = _with(
    jnp,
    "jnp",
    einsum=_einsum,
    broadcast_to=_broadcast_to,
    triu=_triu,
    clip=_clip,
    zeros_like=_zeros_like,
    **{name: _written_out(getattr(jnp, name)) for name in ("tril", "where")},
)
_LAX = _with(jax.lax, "lax", dynamic_slice=_dynamic_slice, select=_select)
# Replaces the attributes of these names in modules of transformers that have them.
_STEPS: dict[str, Any] = {
    "jnp": _JNP,
    "lax": _LAX,
    "jax": _with(jax, "jax", lax=_LAX, numpy=_JNP),
    "make_causal_mask": _make_causal_mask,
    "combine_masks": _combine_masks,
}
