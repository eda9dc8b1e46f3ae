"""PyTorch's FlexAttention on JAX arrays (torch 2.13, torch.nn.attention.flex_attention).

`score_mod(score, b, h, q_idx, kv_idx)` and `mask_mod(b, h, q_idx, kv_idx)` take the arguments of
PyTorch's in the same order, and are elementwise JAX.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal, NamedTuple, overload

import jax
import jax.numpy as jnp

from ..api import flash_attention, flash_attention_with_lse, flash_attention_with_max_logit
from ..core import mods
from ..typing import AnyArray, Array, Bool, Float, MaskMod, ScoreMod
from ._band import ANY, Band, band_of
from ._refusal import check_heads, refuse


class AuxRequest(NamedTuple):
    """Request for more outputs of `flex_attention`: torch's AuxRequest.

    Attributes:
        lse: the log-sum-exp.
        max_scores: the largest visible score of every query.
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
    """A mask of `flex_attention`, made by `create_block_mask`; a pytree.

    It holds no table of blocks, unlike torch's: which blocks are skipped follows from `band`.

    Attributes:
        mask_mod: (b, h, q_idx, kv_idx) -> bool.
        shape: (B, H, Q_LEN, KV_LEN), 1 for an axis that was None.
        band: window that holds all visible keys; keys outside are never loaded.
        dense: bool of this shape, or None.
    """

    mask_mod: MaskMod
    shape: tuple[int, int, int, int]
    band: Band
    dense: Array | None = None


def noop_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Array:
    """Returns True: a mask_mod that hides nothing (torch 2.13)."""
    return jnp.bool_(True)


def and_masks(*mask_mods: MaskMod) -> MaskMod:
    """Returns a mask_mod that sees what all of these see (torch 2.13)."""
    return lambda *where: functools.reduce(jnp.logical_and, (f(*where) for f in mask_mods))


def or_masks(*mask_mods: MaskMod) -> MaskMod:
    """Returns a mask_mod that sees what any of these sees (torch 2.13)."""
    return lambda *where: functools.reduce(jnp.logical_or, (f(*where) for f in mask_mods))


def create_mask(
    mask_mod: MaskMod, B: int | None, H: int | None, Q_LEN: int, KV_LEN: int
) -> Bool[Array, "B H Q_LEN KV_LEN"]:
    """Evaluates a mask_mod for every query and key, as torch 2.13's `create_mask`.

    Args:
        mask_mod: (b, h, q_idx, kv_idx) -> bool, any JAX on scalars.
        B: number of batch entries, None is 1.
        H: number of query heads, None is 1.
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
    sizes = (1 if B is None else B, 1 if H is None else H, Q_LEN, KV_LEN)
    return mapped(*(jnp.arange(size, dtype=jnp.int32) for size in sizes))


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
    """Makes the mask of `flex_attention`, as torch 2.13's `create_block_mask`.

    Comparisons of q_idx with kv_idx, joined by & and |, become a window, outside of which no key is
    loaded: causal masks and sliding windows cost what they cost by `causal` and `window`. Other
    masks are evaluated in the kernel, and what they hide is computed and discarded:
    `flash_pallas.BlockMask`, which `flash_pallas.flash_attention` takes, skips their empty blocks.

    Args:
        mask_mod: (b, h, q_idx, kv_idx) -> bool, elementwise JAX on scalars. It may capture arrays
            that are indexed by b and h.
        B: number of batch entries, None is all the same.
        H: number of query heads, None is all the same.
        Q_LEN: number of queries.
        KV_LEN: number of keys.
        device: refused: JAX has no device here.
        BLOCK_SIZE: refused unless it is the default: tiles are chosen for the GPU.
        dense: evaluate the mask here, into B * H * Q_LEN * KV_LEN bytes; then it may index arrays
            by positions. For packed documents, segment ids of `flash_attention` need no such array.

    Returns:
        A `BlockMask`.

    Raises:
        ValueError: an argument that is refused, or a mask_mod that is not elementwise.

    Example:
        >>> from flash_pallas.compat.flex import create_block_mask
        >>> causal = lambda b, h, q_idx, kv_idx: q_idx >= kv_idx
        >>> create_block_mask(causal, None, None, 1024, 1024).band
        Band(left=None, right=0, exact=True)
    """
    refuse("device", device, None, "leave it out, the mask runs where the arrays lie")
    refuse("BLOCK_SIZE", BLOCK_SIZE, 128, "leave it out, or pass blocks= to flash_attention")
    shape = (1 if B is None else B, 1 if H is None else H, Q_LEN, KV_LEN)
    if dense:
        return BlockMask(mask_mod, shape, ANY, create_mask(mask_mod, *shape))
    try:
        mods.trace(mask_mod, *shape[:2])
    except mods.NotElementwise as error:
        raise ValueError(
            f"mask_mod cannot run inside the kernel: {error}. For packed documents call "
            "flash_attention with q_segment_ids and kv_segment_ids; or pass dense=True, which "
            f"makes an array of {Q_LEN} x {KV_LEN} bytes for each entry of B and H"
        ) from error
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

    torch 2.13, torch.nn.attention.flex_attention. The order on a score: scale, score_mod, mask. A
    query that sees no key returns zeros and a log-sum-exp of -inf.

    Args:
        query: [B, N, T, E].
        key: [B, K, S, E]; K is N, or with `enable_gqa` a divisor of it.
        value: [B, K, S, Ev].
        score_mod: (score, b, h, q_idx, kv_idx) -> score, elementwise JAX on scalars. It may capture
            arrays, differentiable, that are indexed by b and h.
        block_mask: from `create_block_mask`, made for these lengths.
        scale: multiplies the scores, a Python number; None is 1 / sqrt(E).
        enable_gqa: allow K != N.
        return_lse: also return the log-sum-exp; differentiable.
        kernel_options: refused; `blocks` of `flash_attention` has tile sizes.
        return_aux: what else to return, an `AuxRequest`.

    Returns:
        o [B, N, T, Ev] in query's dtype; with `return_lse` the pair of o and the natural
        log-sum-exp, float32 [B, N, T]; with `return_aux` the pair of o and an `AuxOutput`.

    Raises:
        ValueError: a mask of other lengths, heads that differ without `enable_gqa`,
            `kernel_options`, a function that is not elementwise, and as `flash_attention`.
        TypeError: an argument of the wrong kind or dtype.

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
    q, k, v = (jnp.swapaxes(x, 1, 2) for x in (query, key, value))
    check_heads(q, k, enable_gqa)
    options = {"score_mod": score_mod, "scale": scale, "q_offset": 0, **_masking(block_mask, q, k)}
    wanted = return_aux or AuxRequest(lse=return_lse)
    if wanted.max_scores:
        o, *aux = flash_attention_with_max_logit(q, k, v, **options)
    elif wanted.lse:
        o, *aux = (*flash_attention_with_lse(q, k, v, **options), None)
    else:
        o, aux = flash_attention(q, k, v, **options), (None, None)
    o = jnp.swapaxes(o, 1, 2)
    if return_aux is not None:
        return o, AuxOutput(*(x if asked else None for x, asked in zip(aux, wanted, strict=True)))
    return (o, aux[0]) if return_lse else o


def _masking(block_mask: BlockMask | None, q, k) -> dict[str, Any]:
    """Returns the arguments of `flash_attention` for a mask; q and k are [B, length, heads, E]."""
    if block_mask is None:
        return {}
    if not isinstance(block_mask, BlockMask):
        raise TypeError(
            f"block_mask must come from create_block_mask, got {type(block_mask).__module__}."
            f"{type(block_mask).__name__}; flash_pallas.flash_attention takes a flash_pallas."
            "BlockMask"
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
