"""jax's splash attention for TPUs, under the same names, on GPUs (jax 0.11 and 0.12).

It follows the package splash_attention of jax's Pallas ops for TPUs. Masks are objects, and
`make_splash_mha` makes a kernel from one. The kernel takes [heads, length, head_dim] and does not
scale anything. It also accepts mask objects of jax, and others that have the same names and fields.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypedDict, Unpack, cast, overload

import jax
import jax.numpy as jnp
import numpy as np

from ..api import flash_attention_with_lse
from ..frontend import validate
from ..frontend.validate import suggested
from ..frontend.words import Words
from ..typing import AnyArray, Array, Float, Int
from ._band import Band
from ._refusal import check_heads_first, refuse

WORDS = Words(
    {
        "q_segment_ids": "segment_ids.q",
        "kv_segment_ids": "segment_ids.kv",
        "softcap": "attn_logits_soft_cap",
    }
)


class SegmentIds(NamedTuple):
    """Document ids of packed sequences. Here, negative ids are padding.

    Attributes:
        q: integers [T], the ids of the queries.
        kv: integers [S], the ids of the keys.
    """

    q: Int[Array, " T"]
    kv: Int[Array, " S"]


@dataclasses.dataclass(frozen=True)
class Mask:
    """Base class of masks of one head. Masks are combined by & and |.

    Attributes:
        shape: (number of queries, number of keys).
    """

    shape: tuple[int, int]

    def __post_init__(self):
        if not isinstance(self.shape, (tuple, list)) or len(self.shape) != 2:
            raise TypeError(
                f"shape is {self.shape!r}: it must be (number of queries, number of keys)"
            )

    def __and__(self, other: Mask) -> Mask:
        return LogicalAnd(self, other)

    def __or__(self, other: Mask) -> Mask:
        return LogicalOr(self, other)

    def __getitem__(self, index) -> np.ndarray:
        """Returns a part of the mask as an array of bools, as in mask[:, :]."""
        return _dense(_shown(self))[index]

    def __bool__(self) -> bool:
        raise TypeError("a mask has no truth value: join masks by & and |, not by `and` and `or`")


@dataclasses.dataclass(frozen=True)
class FullMask(Mask):
    """Mask that hides nothing."""


@dataclasses.dataclass(frozen=True)
class CausalMask(Mask):
    """Mask that shows query i the keys up to i + offset.

    Attributes:
        offset: position of query 0, where key 0 has position 0.
    """

    offset: int = 0


@dataclasses.dataclass(frozen=True)
class LocalMask(Mask):
    """Mask that shows query i the keys from i + offset - left to i + offset + right.

    Attributes:
        window_size: (left, right); None is unbounded.
        offset: position of query 0, where key 0 has position 0.
    """

    window_size: tuple[int | None, int | None]
    offset: int = 0

    def __post_init__(self):
        super().__post_init__()
        if not isinstance(self.window_size, (tuple, list)) or len(self.window_size) != 2:
            raise TypeError(
                f"window_size is {self.window_size!r}: it must be (left, right), where None is "
                "unbounded"
            )


@dataclasses.dataclass(frozen=True)
class ChunkedCausalMask(Mask):
    """Mask that shows query i the keys of its own chunk up to i.

    Attributes:
        chunk_size: number of positions of a chunk.
    """

    chunk_size: int


@dataclasses.dataclass(frozen=True, init=False)
class NumpyMask(Mask):
    """Mask from an array, where True means visible.

    Attributes:
        array: bool [T, S].
    """

    array: Any

    def __init__(self, array):
        array = np.asarray(array)
        if array.ndim != 2 or array.dtype != bool:
            raise ValueError(
                f"array has shape {array.shape} and dtype {array.dtype}: it must be bool [T, S]"
            )
        object.__setattr__(self, "array", array)
        object.__setattr__(self, "shape", array.shape)


@dataclasses.dataclass(frozen=True, init=False)
class _Joined(Mask):
    """Mask of two masks of one shape."""

    left: Any
    right: Any

    def __init__(self, left, right):
        if left.shape != right.shape:
            raise ValueError(f"masks of shapes {left.shape} and {right.shape} cannot be joined")
        object.__setattr__(self, "left", left)
        object.__setattr__(self, "right", right)
        object.__setattr__(self, "shape", left.shape)


class LogicalAnd(_Joined):
    """Mask that shows what both masks show."""


class LogicalOr(_Joined):
    """Mask that shows what either mask shows."""


@dataclasses.dataclass(frozen=True)
class MultiHeadMask:
    """Masks of all query heads, one for each head.

    Attributes:
        masks: masks of the same shape.
    """

    masks: Sequence[Any]

    def __post_init__(self):
        if not self.masks or any(mask.shape != self.masks[0].shape for mask in self.masks):
            shapes = [mask.shape for mask in self.masks]
            raise ValueError(f"masks have shapes {shapes}: there must be some, all of one shape")

    @property
    def shape(self) -> tuple[int, ...]:
        """(number of heads, number of queries, number of keys)."""
        return (len(self.masks), *self.masks[0].shape)


class _Ids(Protocol):
    """SegmentIds, these or jax's."""

    @property
    def q(self) -> AnyArray: ...
    @property
    def kv(self) -> AnyArray: ...


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True, eq=False)
class SplashAttentionKernel[Result]:
    """Attention of one batch entry with a fixed mask. Use `jax.vmap` for a batch.

    `make_splash_mha` and `make_splash_mqa` make it. Like jax's kernel it is a pytree and may be
    passed to jit and `jax.shard_map`; its only leaf is a mask in the form of an array. Unlike jax's
    kernel, it is differentiable with `save_residuals`.

    Attributes:
        heads: number of query heads.
        lengths: (number of queries, number of keys).
        is_mqa: whether keys and values have no axis of heads.
        save_residuals: whether the log-sum-exp is also returned.
        options: arguments of `flash_attention`.
    """

    heads: int
    lengths: tuple[int, int]
    is_mqa: bool
    save_residuals: bool
    options: dict[str, Any]

    def tree_flatten(self):
        """Returns the mask array, if there is one, as the leaf, and everything static."""
        rest = {name: x for name, x in self.options.items() if name != "mask"}
        sizes = self.heads, self.lengths, self.is_mqa, self.save_residuals
        return (self.options.get("mask"),), (*sizes, tuple(rest.items()))

    @classmethod
    def tree_unflatten(cls, static, leaves):
        """Makes the kernel from what `tree_flatten` returned."""
        (mask,), (heads, lengths, is_mqa, save_residuals, rest) = leaves, static
        options = dict(rest) if mask is None else {"mask": mask, **dict(rest)}
        return cls(heads, lengths, is_mqa, save_residuals, options)

    def __call__(
        self,
        q: Float[AnyArray, "N T H"],
        k: Float[AnyArray, "K S H"],
        v: Float[AnyArray, "K S Hv"],
        segment_ids: _Ids | None = None,
        sinks: Float[AnyArray, " N"] | None = None,
    ) -> Result:
        """Computes attention. Scores are not scaled: multiply q by 1 / sqrt(H) before the call.

        Args:
            q: queries [N, T, H].
            k: keys [K, S, H], or [S, H] if the kernel is_mqa.
            v: values [K, S, Hv], or [S, Hv].
            segment_ids: any object with integers [T] in `q` and [S] in `kv`.
            sinks: [N], one additional score per query, without a value.

        Returns:
            o [N, T, Hv] in q's dtype. With `save_residuals`, (o, (lse [N, T] in float32,)).

        Raises:
            ValueError: the arrays have other lengths or heads than the mask.
        """
        shapes = [validate.as_array(*x).shape for x in (("q", q), ("k", k), ("v", v))]
        if list(map(len, shapes)) != ([3, 2, 2] if self.is_mqa else [3, 3, 3]):
            of_keys = "[keys, head_dim]" if self.is_mqa else "[kv_heads, keys, head_dim]"
            raise ValueError(
                f"q, k and v have shapes {shapes}: q must be [heads, queries, head_dim], k and v "
                f"{of_keys}; map over a batch with jax.vmap(kernel)"
            )
        if self.is_mqa:
            k, v = k[None], v[None]
        sizes = (*jnp.shape(q)[:1], *jnp.shape(q)[-2:-1], *jnp.shape(k)[-2:-1])
        if sizes != (self.heads, *self.lengths):
            raise ValueError(
                f"q and k have (heads, queries, keys) = {sizes} and the mask "
                f"{(self.heads, *self.lengths)}: make the kernel for these"
            )
        ids = {}
        if segment_ids is not None:
            if not (hasattr(segment_ids, "q") and hasattr(segment_ids, "kv")):
                raise TypeError(
                    f"segment_ids is a {type(segment_ids).__name__}: pass SegmentIds(q=ids, "
                    "kv=ids), with integers [queries] and [keys]"
                )
            ids = {"q_segment_ids": segment_ids.q, "kv_segment_ids": segment_ids.kv}
        check_heads_first({"q": q, "k": k, "v": v}, enable_gqa=True)
        with WORDS:
            o, lse = flash_attention_with_lse(
                *(jnp.swapaxes(x, -3, -2) for x in (q, k, v)),
                scale=1.0,
                sinks=sinks,
                **ids,
                **self.options,
            )
        o = jnp.swapaxes(o, -3, -2)
        outputs: Any = (o, (lse,)) if self.save_residuals else o
        return outputs


class _Masks(Protocol):
    """A MultiHeadMask, this one or jax's."""

    @property
    def masks(self) -> Sequence[Any]: ...


class _SplashOptions(TypedDict, total=False):
    """Arguments of `make_splash_mha` that do not affect the type of its result."""

    block_sizes: Any
    mask_value: float | None
    attn_logits_soft_cap: float | None
    downcast_smem_data: bool
    head_shards: int
    q_seq_shards: int
    residual_checkpoint_name: str | None
    interpret: bool


@overload
def make_splash_mha(
    mask: _Masks | AnyArray,
    *,
    save_residuals: Literal[False] = False,
    **options: Unpack[_SplashOptions],
) -> SplashAttentionKernel[Array]: ...
@overload
def make_splash_mha(
    mask: _Masks | AnyArray,
    *,
    save_residuals: Literal[True],
    **options: Unpack[_SplashOptions],
) -> SplashAttentionKernel[tuple[Array, tuple[Array]]]: ...
@overload
def make_splash_mha(
    mask: _Masks | AnyArray,
    *,
    save_residuals: bool,
    **options: Unpack[_SplashOptions],
) -> SplashAttentionKernel[Array] | SplashAttentionKernel[tuple[Array, tuple[Array]]]: ...
@suggested
def make_splash_mha(
    mask: Any,
    *,
    block_sizes: Any = None,
    save_residuals: bool = False,
    mask_value: float | None = None,
    attn_logits_soft_cap: float | None = None,
    downcast_smem_data: bool = True,
    head_shards: int = 1,
    q_seq_shards: int = 1,
    residual_checkpoint_name: str | None = None,
    interpret: bool = False,
) -> SplashAttentionKernel[Any]:
    """Makes the attention kernel of a mask, like jax's `make_splash_mha`.

    jax 0.11, splash_attention_kernel.py. Masks that depend only on positions take no memory, even
    if heads differ. A mask that contains a `NumpyMask` or an array is stored as an array
    [heads, T, S], or [T, S] if all heads have the same mask.

    Args:
        mask: a `MultiHeadMask`, or bool [heads, T, S].
        block_sizes: refused; pass tile sizes as `blocks` of `flash_attention`.
        save_residuals: make the kernel return (o, (lse,)).
        mask_value: refused, because hidden scores are -inf.
        attn_logits_soft_cap: scores become cap * tanh(scores / cap).
        downcast_smem_data: refused unless True.
        head_shards: refused unless 1, because sharded arrays need no other kernel.
        q_seq_shards: refused unless 1.
        residual_checkpoint_name: refused; see `save_attention`.
        interpret: refused unless False.

    Returns:
        A `SplashAttentionKernel`: (q [N, T, H], k [K, S, H], v, segment_ids, sinks) -> o [N, T, H].

    Raises:
        ValueError: an argument is refused, or the mask has another rank.
        TypeError: the mask has an unknown type.

    Example:
        >>> import jax.numpy as jnp
        >>> from flash_pallas.compat import splash
        >>> mask = splash.CausalMask((128, 128)) & splash.LocalMask((128, 128), (31, None), 0)
        >>> kernel = splash.make_splash_mha(splash.MultiHeadMask([mask] * 8))
        >>> q, k = jnp.ones((8, 128, 64)), jnp.ones((2, 128, 64))
        >>> kernel(q / 8, k, k).shape
        (8, 128, 64)
    """
    no_tiles = "leave it out, or pass blocks= to flash_attention"
    names = "leave it out, and pass flash_pallas.save_attention as jax.checkpoint's policy"
    refuse("block_sizes", block_sizes, None, no_tiles)
    refuse("mask_value", mask_value, None, "leave it out, hidden scores are -inf")
    refuse("downcast_smem_data", downcast_smem_data, True, "leave it out")
    refuse("head_shards", head_shards, 1, "leave it out, q sharded over heads needs nothing")
    refuse("q_seq_shards", q_seq_shards, 1, "use flash_pallas.parallel for sharded sequences")
    refuse("residual_checkpoint_name", residual_checkpoint_name, None, names)
    refuse("interpret", interpret, False, "leave it out, on a CPU the jnp version runs")
    if not isinstance(mask, (np.ndarray, jax.Array)):
        options: dict[str, Any] = _options([_shown(head_mask) for head_mask in _masks(mask)])
    elif mask.ndim == 3:
        options = {"mask": jnp.asarray(mask)}
    else:
        raise ValueError(f"mask has shape {mask.shape}: it must be [heads, queries, keys]")
    heads, q_len, kv_len = mask.shape
    options["softcap"] = attn_logits_soft_cap
    return SplashAttentionKernel(heads, (q_len, kv_len), False, save_residuals, options)


def _typed_as[F](original: F) -> Callable[[Callable[..., Any]], F]:
    """Returns a decorator that gives a function the overloads of `original`, for type checkers."""
    return lambda function: cast(F, function)


@_typed_as(make_splash_mha)
def make_splash_mqa(mask: Any, **options: Any) -> SplashAttentionKernel[Any]:
    """Makes the attention kernel of a mask with one key head. The axis of key heads is left out.

    jax 0.11, splash_attention_kernel.py.

    Args:
        mask: as in `make_splash_mha`.
        **options: the other arguments of `make_splash_mha`.

    Returns:
        A `SplashAttentionKernel`: (q [N, T, H], k [S, H], v [S, Hv]) -> o [N, T, Hv].

    Raises:
        Exception: the same exceptions as `make_splash_mha`.

    Example:
        >>> import jax.numpy as jnp
        >>> from flash_pallas.compat import splash
        >>> kernel = splash.make_splash_mqa(splash.MultiHeadMask([splash.FullMask((16, 16))] * 8))
        >>> kernel(jnp.ones((8, 16, 64)), jnp.ones((16, 64)), jnp.ones((16, 64))).shape
        (8, 16, 64)
    """
    return dataclasses.replace(make_splash_mha(mask, **options), is_mqa=True)


make_splash_mha_single_device = make_splash_mha
make_splash_mqa_single_device = make_splash_mqa


@dataclasses.dataclass(frozen=True)
class _Shown:
    """Keys that a mask of one head shows.

    Attributes:
        key: equal for equal masks.
        band: window that holds all that is visible, by indices of queries and keys.
        visible: (i, j) -> bool, for indices of queries and keys.
        elementwise: whether `visible` can run inside a kernel.
        shape: (number of queries, number of keys).
    """

    key: tuple
    band: Band
    visible: Callable
    elementwise: bool
    shape: tuple[int, int]


def _masks(mask) -> list[Any]:
    """Returns the masks of a MultiHeadMask."""
    if type(mask).__name__ != "MultiHeadMask":
        raise TypeError(
            f"mask is a {type(mask).__name__}: it must be a MultiHeadMask, as in "
            "MultiHeadMask([mask] * heads), or bool [heads, queries, keys]"
        )
    return list(mask.masks)


def _shown(mask) -> _Shown:
    """Returns what a mask shows. Classes are told by name: jax's own objects are taken too."""
    kind, shape = type(mask).__name__, tuple(mask.shape)
    if kind in ("FullMask", "CausalMask", "LocalMask"):
        band = _band(kind, mask)
        return _Shown(("band", band), band, functools.partial(_in_band, band), True, shape)
    if kind == "ChunkedCausalMask":
        size = mask.chunk_size
        visible = lambda i, j: (i // size == j // size) & (j <= i)
        return _Shown(("chunk", size), Band(size - 1, 0, exact=False), visible, True, shape)
    if kind == "NumpyMask":
        visible = lambda i, j: mask.array[i, j]
        key = ("array", np.asarray(mask.array).tobytes())
        return _Shown(key, Band(exact=False), visible, False, shape)
    if kind in ("LogicalAnd", "LogicalOr"):
        a, b = _shown(mask.left), _shown(mask.right)
        join = operator.and_ if kind == "LogicalAnd" else operator.or_
        visible = lambda i, j: join(a.visible(i, j), b.visible(i, j))
        elementwise = a.elementwise and b.elementwise
        return _Shown((kind, a.key, b.key), join(a.band, b.band), visible, elementwise, shape)
    raise TypeError(
        f"mask is a {kind}, which is not known here: write it out, as in NumpyMask(mask[:, :])"
    )


def _band(kind: str, mask) -> Band:
    if kind == "FullMask":
        return Band()
    if kind == "CausalMask":
        return Band(right=mask.offset)
    left, right = mask.window_size
    moved = (None if left is None else left - mask.offset, right)
    return Band(moved[0], None if right is None else right + mask.offset)


def _in_band(band: Band, i, j):
    """Returns whether key j lies in the band of query i."""
    inside = (i >= 0) & (j >= 0)
    if band.left is not None:
        inside = inside & (j >= i - band.left)
    if band.right is not None:
        inside = inside & (j <= i + band.right)
    return inside


def _options(shown: list[_Shown]) -> dict[str, Any]:
    """Returns the arguments of `flash_attention` for what all heads show."""
    distinct = {x.key: x for x in shown}
    kinds = list(distinct.values())
    if not all(x.elementwise for x in kinds):
        kept = kinds if len(kinds) == 1 else shown
        return {"mask": jnp.stack([jnp.asarray(_dense(x)) for x in kept])}
    hull = functools.reduce(operator.or_, (x.band for x in kinds))
    offset, window = _placed(hull)
    options = {"q_offset": offset, "window": window}
    if len(kinds) == 1 and hull.exact:
        return options
    groups = jnp.asarray([list(distinct).index(x.key) for x in shown], jnp.int32)

    def mask_mod(b, n, i, j):
        visible = [(groups[n] == g) & x.visible(i - offset, j) for g, x in enumerate(kinds)]
        return functools.reduce(operator.or_, visible)

    return {**options, "mask_mod": mask_mod}


def _placed(band: Band) -> tuple[int, tuple[int | None, int | None] | None]:
    """Returns (q_offset, window) for a band of indices."""
    if band.left is not None and band.right is not None and band.left + band.right < 0:
        raise ValueError(
            f"the mask shows no key to any query: query i may see the keys from i - {band.left} to "
            f"i + {band.right}; check offset and window_size"
        )
    if band.right is not None:
        return band.right, (None if band.left is None else band.left + band.right, 0)
    return (0, None) if band.left is None else (-band.left, (0, None))


def _dense(shown: _Shown):
    """Writes a mask out as bool [T, S]."""
    queries, keys = (np.arange(size, dtype=np.int32) for size in shown.shape)
    return shown.visible(queries[:, None], keys[None])
