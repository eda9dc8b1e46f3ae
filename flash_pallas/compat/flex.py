"""PyTorch's FlexAttention on JAX arrays (torch 2.13, torch.nn.attention.flex_attention).

`score_mod(score, b, h, q_idx, kv_idx)` and `mask_mod(b, h, q_idx, kv_idx)` take the same arguments
in the same order as in PyTorch. They are elementwise JAX functions.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, overload

import jax
import jax.numpy as jnp
import numpy as np

from ..api import flash_attention, flash_attention_with_lse, flash_attention_with_max_logit
from ..frontend import arguments as checks
from ..frontend import functions
from ..frontend.validate import suggested
from ..frontend.words import LONG_NAMES, Words
from ..typing import AnyArray, Array, Bool, Float, MaskMod, ScoreMod
from ._band import ANY, Band, band_of
from ._refusal import check_heads_first, refuse

DENSE = "pass dense=True, which evaluates the mask into an array of Q_LEN x KV_LEN bytes"
WORDS = Words(
    {
        **LONG_NAMES,
        "score, b, n, i, j": "score, b, h, q_idx, kv_idx",
        "b, n, i, j": "b, h, q_idx, kv_idx",
        "the score, i or j": "the score, q_idx or kv_idx",
        "i or j": "q_idx or kv_idx",
        "i and j": "q_idx and kv_idx",
        "b and n": "b and h",
        "b and i": "b and q_idx",
        "b and j": "b and kv_idx",
        "j <= i": "kv_idx <= q_idx",
        "by i, the query": "by q_idx",
        "by j, the key": "by kv_idx",
        "by n": "by h",
        # The argument of this name here takes an array of the other layout.
        "pass what depends on positions as bias= or mask=": "pass what hides keys as block_mask, "
        "and what is added to scores as bias= of flash_pallas.flash_attention",
        "pass what depends on i and j together as mask=": DENSE,
        "pass what depends on all as mask=": DENSE,
    }
)


class AuxRequest(NamedTuple):
    """Request for additional outputs of `flex_attention`: torch's AuxRequest.

    Attributes:
        lse: whether to return the log-sum-exp.
        max_scores: whether to return the largest visible score of every query.
    """

    lse: bool = False
    max_scores: bool = False


class AuxOutput(NamedTuple):
    """Outputs that an `AuxRequest` asked for: torch's AuxOutput.

    Attributes:
        lse: float32 [B, H, T], or None.
        max_scores: float32 [B, H, T], or None.
    """

    lse: Float[Array, "B N T"] | None = None
    max_scores: Float[Array, "B N T"] | None = None


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["dense"],
    meta_fields=["mask_mod", "shape", "band"],
)
@dataclasses.dataclass(frozen=True)
class BlockMask:
    """A mask of `flex_attention`, made by `create_block_mask`. It is a pytree.

    Unlike torch's, it holds no table of blocks. Which blocks are skipped follows from `band`, or
    from the mask_mod if it reads positions alone.

    Attributes:
        mask_mod: (b, h, q_idx, kv_idx) -> bool.
        shape: (B, H, Q_LEN, KV_LEN), with 1 for an axis that was None.
        band: window that contains all visible keys. Keys outside are never loaded.
        dense: the mask as bool of this shape, or None.
    """

    mask_mod: MaskMod
    shape: tuple[int, int, int, int]
    band: Band
    dense: Array | None = None


def noop_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Array:
    """Returns True: a mask_mod that hides nothing (torch 2.13)."""
    return jnp.bool_(True)


def and_masks(*mask_mods: MaskMod) -> MaskMod:
    """Returns a mask_mod that shows what all of these show; of none, all keys (torch 2.13)."""
    return _joined(jnp.logical_and, mask_mods or (noop_mask,))


def or_masks(*mask_mods: MaskMod) -> MaskMod:
    """Returns a mask_mod that shows what any of these shows; of none, no key (torch 2.13)."""
    return _joined(jnp.logical_or, mask_mods or (lambda *indices: jnp.bool_(False),))


def _joined(join: Callable, mask_mods: tuple[Callable, ...]) -> Callable:
    """Returns the mask_mod of one or several that are joined."""
    for number, mask_mod in enumerate(mask_mods):
        if not callable(mask_mod):
            raise TypeError(
                f"mask_mods[{number}] is {mask_mod!r}: each must be a mask_mod (b, h, q_idx, "
                "kv_idx); those of a list are passed as and_masks(*masks)"
            )
    return lambda *indices: functools.reduce(join, (mask_mod(*indices) for mask_mod in mask_mods))


@suggested
def create_mask(
    mask_mod: MaskMod, B: int | None, H: int | None, Q_LEN: int, KV_LEN: int
) -> Bool[Array, "B H Q_LEN KV_LEN"]:
    """Evaluates a mask_mod for every query and key, like torch 2.13's `create_mask`.

    Args:
        mask_mod: (b, h, q_idx, kv_idx) -> bool, any JAX function of scalars.
        B: number of batch entries; None means 1.
        H: number of query heads; None means 1.
        Q_LEN: number of queries.
        KV_LEN: number of keys.

    Returns:
        bool [B, H, Q_LEN, KV_LEN], a `mask` of `flash_attention`.

    Example:
        >>> from flash_pallas.compat.flex import create_mask
        >>> create_mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, None, None, 2, 3)[0, 0]
        Array([[ True, False, False],
               [ True,  True, False]], dtype=bool)
    """
    mapped = mask_mod
    for axis in (3, 2, 1, 0):
        mapped = jax.vmap(mapped, tuple(0 if i == axis else None for i in range(4)))
    sizes = _sizes(B=B, H=H, Q_LEN=Q_LEN, KV_LEN=KV_LEN)
    return mapped(*(jnp.arange(size, dtype=jnp.int32) for size in sizes))


def _sizes(**sizes) -> tuple[int, int, int, int]:
    """Returns (B, H, Q_LEN, KV_LEN), 1 for None."""
    for name, size in sizes.items():
        optional = name in ("B", "H")
        if optional and size is None:
            sizes[name] = 1
        elif isinstance(size, bool) or not isinstance(size, (int, np.integer)) or size < 1:
            raise ValueError(
                f"{name} is {size!r}: it must be a positive int{', or None for any' * optional}; "
                "the order is mask_mod, B, H, Q_LEN, KV_LEN"
            )
    b, h, q_len, kv_len = map(int, sizes.values())
    return b, h, q_len, kv_len


@suggested
def create_block_mask(
    mask_mod: MaskMod,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: None = None,
    BLOCK_SIZE: Literal[128] = 128,
    *,
    dense: bool = False,
) -> BlockMask:
    """Makes the mask of `flex_attention`, like torch 2.13's `create_block_mask`.

    Comparisons of q_idx with kv_idx that are joined by & and | become a window, outside of which no
    key is loaded. So causal masks and sliding windows cost as much as with `causal` and `window`.
    Other masks are evaluated in the kernel. Their empty blocks are skipped only if the mask_mod
    reads nothing but q_idx and kv_idx and the lengths are long enough, as for `mask_mod` of
    `flash_attention`; otherwise hidden scores are computed and discarded. `flash_pallas.BlockMask`,
    which `flash_pallas.flash_attention` takes, skips the empty blocks of every mask.

    Args:
        mask_mod: (b, h, q_idx, kv_idx) -> bool, elementwise JAX on scalars. It may capture arrays.
            Arrays of integers and bools, such as document ids, are indexed by b and q_idx or by b
            and kv_idx; others by b and h.
        B: number of batch entries; None means that all have the same mask.
        H: number of query heads; None means that all have the same mask.
        Q_LEN: number of queries.
        KV_LEN: number of keys.
        device: refused, because the mask runs where the arrays are.
        BLOCK_SIZE: refused unless it is the default, because tiles are chosen for the GPU.
        dense: evaluate the mask at once into B * H * Q_LEN * KV_LEN bytes. The mask_mod may then
            index any array by anything.

    Returns:
        A `BlockMask`.

    Raises:
        TypeError: mask_mod takes other arguments, or does not return one bool.
        ValueError: an argument is refused, or mask_mod is not elementwise.

    Example:
        >>> from flash_pallas.compat.flex import create_block_mask
        >>> causal = lambda b, h, q_idx, kv_idx: q_idx >= kv_idx
        >>> create_block_mask(causal, None, None, 1024, 1024).band
        Band(left=None, right=0, exact=True)
    """
    refuse("device", device, None, "leave it out, the mask runs where the arrays lie")
    refuse("BLOCK_SIZE", BLOCK_SIZE, 128, "leave it out, or pass blocks= to flash_attention")
    shape = _sizes(B=B, H=H, Q_LEN=Q_LEN, KV_LEN=KV_LEN)
    if dense:
        return BlockMask(mask_mod, shape, ANY, create_mask(mask_mod, *shape))
    positions = lambda: [jnp.arange(n, dtype=jnp.int32)[None] for n in (Q_LEN, KV_LEN)]
    sizes = checks.Sizes(shape[:1], Q_LEN, KV_LEN, shape[1], shape[1], jnp.float32)
    try:
        with WORDS:
            if (traced := functions.mod("mask_mod", mask_mod, sizes, positions)) is None:
                raise TypeError("mask_mod is None: pass noop_mask, or block_mask=None")
            functions.marks(traced)
    except ValueError as error:
        if error.__cause__ is not None or DENSE in str(error):
            raise  # JAX's own refusal would be the same
        raise ValueError(f"{error}; or {DENSE}") from None
    return BlockMask(mask_mod, shape, band_of(mask_mod))


@overload
def flex_attention(
    query: AnyArray,
    key: AnyArray,
    value: AnyArray,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: Literal[False] = False,
    kernel_options: None = None,
    *,
    return_aux: None = None,
) -> Array: ...
@overload
def flex_attention(
    query: AnyArray,
    key: AnyArray,
    value: AnyArray,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    return_lse: Literal[True],
    kernel_options: None = None,
    return_aux: None = None,
) -> tuple[Array, Array]: ...
@overload
def flex_attention(
    query: AnyArray,
    key: AnyArray,
    value: AnyArray,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: Literal[False] = False,
    kernel_options: None = None,
    *,
    return_aux: AuxRequest,
) -> tuple[Array, AuxOutput]: ...
@overload
def flex_attention(
    query: AnyArray,
    key: AnyArray,
    value: AnyArray,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    return_lse: bool,
    kernel_options: None = None,
    return_aux: AuxRequest | None = None,
) -> Any: ...
@suggested
def flex_attention(
    query: Float[AnyArray, "B N T E"],
    key: Float[AnyArray, "B K S E"],
    value: Float[AnyArray, "B K S Ev"],
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: None = None,
    *,
    return_aux: AuxRequest | None = None,
) -> Any:
    """Computes attention with the arguments of PyTorch's `flex_attention`.

    torch 2.13, torch.nn.attention.flex_attention. A score is modified in the order scale,
    score_mod, and then masked. A query that sees no key returns zeros and a log-sum-exp of -inf.

    Args:
        query: [B, N, T, E].
        key: [B, K, S, E]; K is N, or with `enable_gqa` a divisor of N.
        value: [B, K, S, Ev].
        score_mod: (score, b, h, q_idx, kv_idx) -> score, elementwise JAX on scalars. It may capture
            arrays that are indexed by b and h, which are differentiable.
        block_mask: a mask from `create_block_mask`, made for these lengths.
        scale: factor of the scores, a Python number; None is 1 / sqrt(E).
        enable_gqa: allow K to differ from N.
        return_lse: also return the log-sum-exp, which is differentiable.
        kernel_options: refused; pass tile sizes as `blocks` of `flash_attention`.
        return_aux: an `AuxRequest` that says what else to return.

    Returns:
        o [B, N, T, Ev] in query's dtype. With `return_lse`, the pair of o and the natural
        log-sum-exp, float32 [B, N, T]. With `return_aux`, the pair of o and an `AuxOutput`.

    Raises:
        ValueError: the mask has other lengths, heads differ without `enable_gqa`, `kernel_options`
            are given, or a function is not elementwise.
        TypeError: an argument has the wrong kind or dtype.
        Exception: the same exceptions as `flash_attention`.

    Example:
        >>> import jax.numpy as jnp
        >>> from flash_pallas.compat.flex import create_block_mask, flex_attention
        >>> mask = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 16, 16)
        >>> x = jnp.ones((2, 4, 16, 64))
        >>> flex_attention(x, x, x, lambda s, b, h, q, kv: s - (q - kv), mask).shape
        (2, 4, 16, 64)
    """
    refuse("kernel_options", kernel_options, None, "pass blocks= to flash_attention")
    if return_lse and return_aux is not None:
        raise ValueError(
            "return_lse and return_aux are both given: pass return_aux=AuxRequest(lse=True)"
        )
    check_heads_first({"query": query, "key": key, "value": value}, enable_gqa)
    if jnp.ndim(query) != 4:
        raise ValueError(
            f"query has shape {jnp.shape(query)}: it must be [batch, heads, length, head_dim]"
        )
    q, k, v = (jnp.swapaxes(x, 1, 2) for x in (query, key, value))
    options = {"score_mod": score_mod, "scale": scale, "q_offset": 0, **_masking(block_mask, q, k)}
    request = return_aux or AuxRequest(lse=return_lse)
    with WORDS:
        if request.max_scores:
            o, *aux = flash_attention_with_max_logit(q, k, v, **options)
        elif request.lse:
            o, *aux = (*flash_attention_with_lse(q, k, v, **options), None)
        else:
            o, aux = flash_attention(q, k, v, **options), (None, None)
    o = jnp.swapaxes(o, 1, 2)
    if return_aux is not None:
        return o, AuxOutput(*(x if asked else None for x, asked in zip(aux, request, strict=True)))
    return (o, aux[0]) if return_lse else o


def _masking(block_mask: BlockMask | None, q, k) -> dict[str, Any]:
    """Returns the arguments of `flash_attention` for a mask; q and k are [B, length, heads, E]."""
    if block_mask is None:
        return {}
    if not isinstance(block_mask, BlockMask):
        kind = type(block_mask)
        type_name = (
            "an array" if checks.is_array(block_mask) else f"{kind.__module__}.{kind.__name__}"
        )
        raise TypeError(
            f"block_mask must come from create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN), got "
            f"{type_name}; flash_pallas.flash_attention takes a flash_pallas.BlockMask"
        )
    sizes = (jnp.shape(q)[0], jnp.shape(q)[2], jnp.shape(q)[1], jnp.shape(k)[1])
    broadcast = [made in (size, 1) for made, size in zip(block_mask.shape[:2], sizes, strict=False)]
    if block_mask.shape[2:] != sizes[2:] or not all(broadcast):
        raise ValueError(
            f"block_mask was made for (B, H, Q_LEN, KV_LEN) = {block_mask.shape} and the arrays "
            f"have {sizes}: make it for these sizes, where None for B and H is any"
        )
    if block_mask.dense is not None:
        return {"mask": block_mask.dense}
    band = block_mask.band
    return {"window": band.window, "mask_mod": None if band.is_window else block_mask.mask_mod}
