"""Mesh axes that shard each array of a call: the one rule, wherever arrays' shardings are known.

The batch is sharded by what shards the batch of q, the heads by what shards its heads. Every other
array follows: one with an entry of its own for each batch entry or head is sharded alike; one that
several of them share is whole on every device, which takes the entries that it reads.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from . import mesh_axes, softmax
from .decode import DecodeOperands
from .problem import Operands
from .ragged import RaggedOperands
from .scores import MARKS

# The axes of every array: b batch, n query heads, k key heads, "." one that is never cut. B is the
# batch of a bias, a divisor of b, and N its heads, n or 1.
PLACES = {
    **dict.fromkeys(("q", "o", "do"), "b.n."),
    **dict.fromkeys(("k", "v"), "b.k."),
    **dict.fromkeys(("bias", "mask", "block_lists"), "BN.."),
    "kv_blocks": "bN.",
    **dict.fromkeys(("q_offset", "q_lengths", "kv_lengths", "kv_starts", "window_left"), "b"),
    "prefix_lengths": "b",
    **dict.fromkeys(
        ("q_segments", "q_first", "q_last", "q_positions", "q_places", *MARKS[0]), "b."
    ),
    **dict.fromkeys(("kv_segments", "kv_positions", "kv_places", "page_table", *MARKS[1]), "b."),
    "draft_mask": "b..",
    **dict.fromkeys(("alibi_slopes", "sinks", "dropout_keys"), "bn"),
    **dict.fromkeys(("score_params", "mask_params"), "bn"),
    **dict.fromkeys(("lse_log2", "shift", "max_logit", "delta", "dlse"), "bn."),
    **dict.fromkeys(("k_scale", "v_scale"), "Bk"),
}
# Pages belong to all sequences, so nothing of the batch cuts them.
PAGES = {**dict.fromkeys(("k", "v"), "..k."), **dict.fromkeys(("k_scale", "v_scale"), ".k")}


# Packed queries, with an axis of 1 in front, belong to all sequences too.
PACKED = {
    "q": "..n.",
    "page_table": "..",
    **dict.fromkeys(("kv_lengths", "cu_q_lens", "kv_starts", "window_left", "prefix_lengths"), "."),
    "num_seqs": "",
    **dict.fromkeys(("sinks", "alibi_slopes"), ".n"),
}


@dataclasses.dataclass(frozen=True, eq=False)
class Shards:
    """Mesh axes over which a call is sharded, major first.

    Attributes:
        whole: the operands, or their shapes, before sharding.
        batch, heads: names of the mesh axes that shard the batch and the heads.
        counts: number of parts into which each of the two is cut.
    """

    whole: Any
    batch: tuple[str, ...]
    heads: tuple[str, ...]
    counts: tuple[int, int]

    @classmethod
    def of(cls, whole, cuts, sizes: dict[str, int]) -> Shards:
        """Returns the shards of a call whose q, k and v are sharded by `cuts`.

        An axis that does not divide what it shards, as 8 devices do not divide 12 heads, shards the
        other of batch and heads if it divides that, and else nothing.

        Args:
            whole: Operands, DecodeOperands, or RaggedOperands with q [1, tokens, N, H].
            cuts: the mesh axes that shard each axis of q, of k and of v.
            sizes: sizes of all mesh axes, by name.

        Raises:
            ValueError: the axis of queries or of keys is sharded.
        """
        places = _places(whole)
        _check_whole_sequences(places, cuts)
        of_batch, of_heads = (_asked(places, cuts, letters) for letters in ("b", "nk"))
        count = lambda names: math.prod(sizes[a] for a in names)

        def dividing(axis, names):
            while whole.q.shape[axis] % count(names):
                names = names[:-1]
            return names

        batch = dividing(0, of_batch)
        heads = dividing(2, tuple(a for a in of_heads if a not in batch))
        for name in [a for a in of_batch + of_heads if a not in batch + heads]:
            if whole.q.shape[0] % count((*batch, name)) == 0:
                batch = (*batch, name)
            elif whole.q.shape[2] % count((*heads, name)) == 0:
                heads = (*heads, name)
        return cls(whole, batch, heads, (count(batch), count(heads)))

    def run(self, call, *mine):
        """Calls `call` on one shard's arguments; if it returns gradients, sums them over shards."""
        select = lambda x: self.selected(x) if isinstance(x, type(mine[0])) else x
        parts = tuple(map(select, mine))
        returned = call(*mesh_axes.spread(parts, mesh_axes.varying(parts)))
        return self.summed(mine[0], returned) if isinstance(returned, Operands) else returned

    def specs(self, record):
        """Returns the PartitionSpecs of a NamedTuple of whole arrays."""
        specs_of = lambda name: jax.tree.map(
            lambda x: self.spec(name, x.shape), getattr(record, name)
        )
        return record._replace(**{name: specs_of(name) for name in record._fields})

    def result_specs(self, results: Any):
        """Returns the PartitionSpecs of a call's results; those of gradients are its operands'.

        Args:
            results: Outputs, or Operands where they are gradients.
        """
        shapes: dict[str, Any] = dict.fromkeys(results._fields, ())
        if results is Operands:
            shapes |= {
                n: x.shape
                for n in ("q", "k", "v", "bias")
                if (x := getattr(self.whole, n)) is not None
            }
        specs: dict[str, Any] = {name: self.spec(name, shape) for name, shape in shapes.items()}
        return results(**specs)

    def spec(self, name: str, shape) -> PartitionSpec:
        """Returns the PartitionSpec of an array.

        The shape is needed where some axis may be smaller than q's.
        """
        return PartitionSpec(*(axes or None for axes in self._cuts(name, shape)))

    def _cuts(self, name: str, shape) -> list[tuple[str, ...]]:
        """Returns the mesh axes that shard each axis of an array of PLACES.

        A PartitionSpec does not serve here: it stores a single name as a string, not as a tuple.
        """
        letters = _places(self.whole)[name]
        cut = {"b": self.batch, "n": self.heads, "B": self.batch, "N": self.heads, "k": self.heads}
        counts = {"B": self.counts[0], "N": self.counts[1], "k": self.counts[1]}
        sizes = (*shape, *(0,) * (len(letters) - len(shape)))
        return [
            cut.get(letter, ()) if size % counts.get(letter, 1) == 0 else ()
            for letter, size in zip(letters, sizes, strict=True)
        ]

    def selected(self, mine):
        """Returns one shard's operands, with only the entries it reads of those not sharded."""
        shared = {name: getattr(mine, name) for name in self._shared}
        return mine._replace(
            **{n: x if x is None else self._select(n)(x) for n, x in shared.items()}
        )

    def summed(self, mine: Operands, grads: Operands) -> Operands:
        """Computes gradients of one shard's operands from those of what `selected` made of them."""
        pairs = {name: (getattr(mine, name), getattr(grads, name)) for name in ("k", "v", "bias")}
        return grads._replace(
            **{n: None if g is None else self._sum(n, x, g) for n, (x, g) in pairs.items()}
        )

    @property
    def _shared(self) -> list[str]:
        """Operands of which several batch entries, or several heads, may read the same entry."""
        places = _places(self.whole)
        return [n for n in self.whole._fields if not {"B", "k"}.isdisjoint(places[n])]

    def _select(self, name: str):
        """Returns the function from a shard's array of this name to the entries that it reads."""
        x, q, letters = getattr(self.whole, name), self.whole.q, _places(self.whole)[name]
        of_heads = "k" in letters
        axis, names = (
            letters.index("k" if of_heads else "B"),
            self.heads if of_heads else self.batch,
        )
        entries, count = x.shape[axis], self.counts[of_heads]
        if entries == 1 or entries % count == 0:
            return lambda x: x
        readers_axis = 2 if of_heads else 0
        mine, readers = q.shape[readers_axis] // count, q.shape[readers_axis] // entries
        together = math.gcd(mine, readers)  # so many neighbours of this shard share an entry

        def select(x):
            reader = jnp.arange(0, mine, together, dtype=jnp.int32) + lax.axis_index(names) * mine
            return jnp.take(x, reader // readers, axis=axis, mode="clip")

        return select

    def _sum(self, name: str, x, grad):
        """Sums the gradient of x over all shards that read it, in float32 as kernels do."""
        cut = {a for axes in self._cuts(name, getattr(self.whole, name).shape) for a in axes}
        shared = tuple(a for a in self.batch + self.heads if a not in cut)
        if not shared:
            return grad
        exact = grad.astype(softmax.sum_dtype(grad.dtype))
        zeros = mesh_axes.spread(jnp.zeros(x.shape, exact.dtype), mesh_axes.varying(exact))
        (exact,) = jax.vjp(self._select(name), zeros)[1](exact)
        return lax.psum(exact, shared).astype(grad.dtype)


def _places(operands) -> dict[str, str]:
    """Returns PLACES, updated by PAGES if the operands have a paged cache, and by PACKED."""
    if isinstance(operands, RaggedOperands):
        return PLACES | PAGES | PACKED
    paged = isinstance(operands, DecodeOperands) and operands.page_table is not None
    return PLACES | PAGES if paged else PLACES


def _asked(places, cuts, letters: str) -> tuple[str, ...]:
    """Returns the mesh axes of the first sharded axis of q, k or v that is one of these letters."""
    for name, cut in zip("qkv", cuts, strict=True):
        for letter, axes in zip(places[name], cut, strict=True):
            if axes and letter in letters:
                return axes
    return ()


def _check_whole_sequences(places, cuts):
    for name, cut in zip("qkv", cuts, strict=True):
        if cut[1] and name == "q" and places["q"] == PACKED["q"]:
            raise ValueError(
                f"the axis of tokens of q is sharded over {cut[1]}: any sequence may have any of "
                "them. Shard heads, as in jax.sharding.reshard(q, jax.P(None, 'model')), or give "
                "each device sequences and pages of its own, by jax.shard_map"
            )
        if cut[1]:
            raise ValueError(
                f"the sequence axis of {name} is sharded over {cut[1]}: flash_attention and "
                "flash_decode want whole sequences. Call "
                "flash_pallas.parallel.context_parallel_attention, or "
                f"gather them, as in jax.lax.with_sharding_constraint({name}, "
                "jax.P('data', None, 'model')), or jax.sharding.reshard where axes are Explicit"
            )
        if cut[0] and places[name][0] == ".":
            raise ValueError(
                f"the axis of pages of {name} is sharded over {cut[0]}: any sequence may have any "
                f"page. Shard heads, as in jax.sharding.reshard({name}, jax.P(None, None, "
                "'model')), or give each device sequences and pages of its own, by jax.shard_map"
            )
