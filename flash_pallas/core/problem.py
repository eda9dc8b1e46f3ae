"""Records that every backend reads: the parameters, operands, shapes and results of a call."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .mask import Mask
from .mods import Mod

PRECISIONS = ("default", "high", "highest")  # see flash_attention
DERIVATIVES = ("reverse", "any")  # likewise
# Fields of AttentionSpec that are no modifiers of scores; every other field counts as one.
NO_MODIFIERS = {
    "scale", "mask", "q_offset", "block_shape", "deterministic", "precision", "differentiable",
    "max_logit",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """Static parameters of one attention call: everything but the arrays.

    The order on a score: scale, bias, ALiBi, softcap, score_mod, then everything that hides.

    Attributes:
        scale: multiplies q @ k^T.
        mask: the static part of the mask, in positions.
        q_offset: position of query 0 relative to key 0, where it is known at trace time.
        softcap: logits become softcap * tanh(logits / softcap).
        dropout_rate: share of the weights that are dropped, in [0, 1).
        score_mod: the user's function of a score.
        mask_mod: the user's function that says which keys are visible.
        block_shape: (queries, keys) of a block of `block_lists`; None without them.
        deterministic: True if the gradients must be bit-identical from run to run.
        precision: precision of float32 matmuls, one of PRECISIONS; other dtypes always have "high".
        differentiable: one of DERIVATIVES: what a caller may differentiate, and how often.
        max_logit: True if the largest logit of every query is wanted too.
    """

    scale: float
    mask: Mask = Mask()
    q_offset: int = 0
    softcap: float | None = None
    dropout_rate: float = 0.0
    score_mod: Mod | None = None
    mask_mod: Mod | None = None
    block_shape: tuple[int, int] | None = None
    deterministic: bool = False
    precision: str = "high"
    differentiable: str = "reverse"
    max_logit: bool = False

    @functools.cached_property
    def modifiers(self) -> frozenset[str]:
        """Names of the fields that are on and change scores, hide keys or drop weights."""
        fields = [field for field in dataclasses.fields(self) if field.name not in NO_MODIFIERS]
        return frozenset(f.name for f in fields if getattr(self, f.name) != f.default)

    @functools.cached_property
    def score_modifiers(self) -> frozenset[str]:
        """Names of the modifiers that change the values of scores, by any function."""
        return self.modifiers - {"mask_mod", "dropout_rate"}

    @functools.cached_property
    def only_caps(self) -> bool:
        """True if a softcap is all that changes the values of scores."""
        return self.score_modifiers == {"softcap"}

    def unit(self, added: bool) -> float:
        """Returns the factor from logits as `scores.Logits` has them to natural ones.

        Args:
            added: True if there is a bias, or ALiBi.
        """
        if self.score_modifiers - {"softcap"}:
            return 1.0
        if self.softcap is not None:
            return self.softcap
        return 1.0 if added else self.scale


class Operands(NamedTuple):
    """The arrays of one call, with batch dimensions folded into one; an absent one is None.

    Bb is a divisor of B: entry b of the batch reads entry b // (B // Bb). N1 is N or 1, and so on.
    Gradients are one too, in the dtypes and shapes of the operands; those not asked for are absent.
    """

    q: Any  # [B, T, N, H]
    k: Any  # [B, S, K, H]
    v: Any  # [B, S, K, Hv]
    q_offset: Any = None  # int32[B], or None where spec.q_offset says it
    q_lengths: Any = None  # int32[B], queries from this index on see no key; backends may ignore it
    kv_lengths: Any = None  # int32[B], keys from this index on are hidden
    q_segments: Any = None  # int32[B, T], -1 for padding
    kv_segments: Any = None  # int32[B, S], -2 for padding
    # Each query sees the keys at positions q_first to q_last, both included; None is unbounded.
    q_first: Any = None  # int32[B, T]
    q_last: Any = None  # int32[B, T]
    q_positions: Any = None  # int32[B, T]; None: index + q_offset. Only ALiBi and mods read them
    kv_positions: Any = None  # int32[B, S]; None: the index
    # Values of mask_mod that depend on arrays and on one position only, see core/mods.py.
    q_marks_0: Any = None  # int32[B, T]
    q_marks_1: Any = None
    kv_marks_0: Any = None  # int32[B, S]
    kv_marks_1: Any = None
    bias: Any = None  # any float [Bb, N1, T1, S1]
    mask: Any = None  # bool[Bb, N1, T1, S1], True is visible
    # int32[Bb, N1, Q blocks, 2 + M], see core/block_lists.py. Of whole blocks, mask and mask_mod
    # hide nothing.
    block_lists: Any = None
    alibi_slopes: Any = None  # f32[B, N]
    sinks: Any = None  # f32[B, N], natural logits
    dropout_keys: Any = None  # uint32[B, N], see core/dropout.py
    # Positions for dropout, where these are parts of longer sequences; None: the usual positions.
    q_places: Any = None  # int32[B, T]
    kv_places: Any = None  # int32[B, S], every entry has the same
    score_params: tuple = ()  # [B, N] each: what score_mod captured, see core/mods.py
    mask_params: tuple = ()  # [B, N] each: what mask_mod captured


# Operands of score modifiers that may have gradients, besides q, k and v.
EXTRA_GRADS = ("bias", "alibi_slopes", "score_params")


@dataclasses.dataclass(frozen=True)
class Shapes:
    """Sizes of a call in jax.nn's letters, q [B, T, N, H], k [B, S, K, H], v [B, S, K, Hv].

    Attributes:
        dtype: dtype of q and o.
    """

    batch: int
    q_len: int
    kv_len: int
    q_heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: np.dtype

    @property
    def group(self) -> int:
        """Number of query heads that share one KV head (1 for multi-head attention)."""
        return self.q_heads // self.kv_heads

    @property
    def is_empty(self) -> bool:
        """True if there is no query or no key: the answer is known without a backend."""
        return 0 in (self.batch, self.q_len, self.kv_len)

    def empty_result(self, sinks=None) -> tuple[Any, Any]:
        """Returns (o [B, T, N, Hv], natural lse [B, N, T]) of rows that see no key.

        Args:
            sinks: [B, N], natural logits, or None.
        """
        rows = self.batch, self.q_heads, self.q_len
        o = jnp.zeros((self.batch, self.q_len, self.q_heads, self.v_head_dim), self.dtype)
        if sinks is not None:
            return o, jnp.broadcast_to(sinks[..., None], rows)
        wide = jnp.float64 if self.dtype == jnp.float64 else jnp.float32
        return o, jnp.full(rows, -jnp.inf, wide)


@dataclasses.dataclass(frozen=True)
class Problem(Shapes):
    """Shapes, dtypes and spec of a call, from which a backend tells support, tile sizes and FLOPs.

    Attributes:
        features: the fields of Operands that are present, besides q, k and v.
        bias_shape, mask_shape: four sizes of these operands, or None.
        bias_dtype: a numpy dtype, or None.
    """

    operation: ClassVar[str] = "attention"  # of backends.base.Backend
    spec: AttentionSpec
    features: frozenset[str] = frozenset()
    bias_shape: Any = None
    mask_shape: Any = None
    bias_dtype: Any = None

    @property
    def unit(self) -> float:
        """Factor from logits as `scores.Logits` has them to natural ones."""
        return self.spec.unit(bool({"bias", "alibi_slopes"} & self.features))

    @property
    def is_dynamic(self) -> bool:
        """True if an array decides which blocks are read, beyond arithmetic on a q_offset."""
        return bool({"kv_lengths", "block_lists"} & self.features) or self.hides_by_arrays

    @property
    def hides_by_arrays(self) -> bool:
        """True if arrays hide keys anywhere in a tile, not only those beyond a length."""
        return bool({"q_segments", "q_first", "q_last"} & self.features)

    @property
    def is_listed(self) -> bool:
        """True if lists say which tiles are read."""
        return "block_lists" in self.features

    @property
    def list_block(self) -> tuple[int, int]:
        """(queries, keys) of a block of the lists, of a problem that is listed."""
        assert self.spec.block_shape is not None
        return self.spec.block_shape

    def takes_tiles(self, rows: int, columns: int) -> bool:
        """Returns whether tiles of so many queries and keys serve the lists, if there are any."""
        block_q, block_kv = self.spec.block_shape or (rows, columns)
        return block_q % rows == 0 and block_kv % columns == 0

    @functools.cached_property
    def of_whole_tiles(self) -> Problem:
        """The problem of tiles that lists call whole: mask and mask_mod hide nothing there."""
        if not self.is_listed:
            return self
        spec = dataclasses.replace(self.spec, mask_mod=None)
        features = self.features - {"mask", "mask_params"}
        return dataclasses.replace(self, spec=spec, features=features, mask_shape=None)

    @property
    def is_packed(self) -> bool:
        """True if ids, positions and lengths hide keys, and nothing else reads an array but sinks.

        So a tile is hidden, whole or cut by bounds, as of a causal mask.
        """
        places = {"q_segments", "kv_segments", "q_first", "q_last", "kv_positions"}
        others = self.features - places - {"q_lengths", "kv_lengths", "sinks"}
        return self.hides_by_arrays and not others and self.spec.mask.left is None

    @property
    def traced_offset(self) -> bool:
        """True if the query offset is an array."""
        return "q_offset" in self.features


class Outputs(NamedTuple):
    """Results of a backend's forward."""

    o: Any  # [B, T, N, Hv] in q's dtype
    lse_log2: Any  # f32[B, N, T], see core/softmax.py
    shift: Any = None  # f32[B, N, T], likewise; None is 0
    max_logit: Any = None  # f32[B, N, T], natural, -inf without keys; where spec.max_logit


class Tangents(NamedTuple):
    """Results of a backend's forward mode, and of its forward unless that was run before."""

    o: Any  # as of Outputs, as are the next two; None where they were known
    lse_log2: Any
    shift: Any
    do: Any  # [B, T, N, Hv], tangent of o
    dlse: Any  # f32[B, N, T], tangent of the natural log-sum-exp


class Cotangents(NamedTuple):
    """Inputs of a backend's backward, besides the operands."""

    lse_log2: Any  # f32[B, N, T], of the forward; EMPTY_ROW for rows without keys
    do: Any  # [B, T, N, Hv]
    delta: Any  # f32[B, N, T], rowsum(o * do) - dlse; maybe None where a backend reads o
    shift: Any = None  # f32[B, N, T], of the forward
    # None unless a backend reads them: Vjp.reads_output.
    o: Any = None  # [B, T, N, Hv], of the forward
    dlse: Any = None  # f32[B, N, T], cotangent of the natural log-sum-exp; None is 0


def describe(operands: Operands, spec: AttentionSpec) -> Problem:
    """Returns the Problem of these operands."""
    batch, q_len, q_heads, head_dim = operands.q.shape
    _, kv_len, kv_heads, v_head_dim = operands.v.shape
    bias, mask = operands.bias, operands.mask
    present = operands._asdict().items()
    return Problem(
        batch=batch,
        q_len=q_len,
        kv_len=kv_len,
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        dtype=np.dtype(operands.q.dtype),
        spec=spec,
        features=frozenset(
            name for name, x in present if name not in ("q", "k", "v") and jax.tree.leaves(x)
        ),
        bias_shape=None if bias is None else tuple(bias.shape),
        mask_shape=None if mask is None else tuple(mask.shape),
        bias_dtype=None if bias is None else np.dtype(bias.dtype),
    )


def own_width(operands) -> contextlib.AbstractContextManager:
    """Returns the context in which a backend computes: only float64 q has numbers of 64 bits.

    With `jax_enable_x64` Python's numbers are int64 and float64 there too, which kernels do not
    have. Within the context they are what they are without it, so a call is lowered to the same
    code either way.
    """
    if operands.q.dtype == np.float64 or not jax.config.jax_enable_x64:
        return contextlib.nullcontext()
    return jax.enable_x64(False)
