"""vmap of attention: the vmapped axis becomes part of the batch.

A kernel then sees one larger batch instead of one more grid axis. What is not batched is repeated,
except a bias or a mask: entry b of a batch of B reads entry b // (B // Bb) of a bias of Bb entries,
and the order in which the two batches are folded is chosen so that this stays true.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

SHARED = ("bias", "mask")  # operands whose batch may be a divisor of the batch


def fold_vmap(call, wanted: frozenset[str] = frozenset()):
    """`call` with a vmapped axis folded into axis 0 of every argument and result.

    Args:
        call: (Operands, ...) -> a tree of arrays, all with the batch first.
        wanted: shared operands that `call` returns a gradient of: vmap wants one for each of its
            members, so these are repeated.
    """
    folding = custom_vmap(call)

    @folding.def_vmap
    def fold(axis_size, is_batched, operands, *rest):
        batch = operands.q.shape[1 if is_batched[0].q else 0]
        shared = {name: getattr(operands, name) for name in SHARED}
        inner = any(
            x is not None and not getattr(is_batched[0], name) and name not in wanted and len(x) > 1
            for name, x in shared.items()
        )
        fold = _Fold(axis_size, batch, inner)
        one = {
            name: x if x is None else fold.shared(x, getattr(is_batched[0], name), name in wanted)
            for name, x in shared.items()
        }
        bare = operands._replace(**dict.fromkeys(SHARED))
        kinds = is_batched[0]._replace(**dict.fromkeys(SHARED))
        folded = jax.tree.map(fold.one, bare, kinds)._replace(**one)
        others = jax.tree.map(fold.one, rest, tuple(is_batched[1:]))
        out = folding(folded, *others)
        return jax.tree.map(fold.undone, out), jax.tree.map(lambda _: True, out)

    return folding


@dataclasses.dataclass(frozen=True)
class _Fold:
    """How `size` members of a batch of `batch` entries are folded into one.

    Attributes:
        size: of the vmapped axis.
        batch: entries of each member.
        inner: entry b of member i becomes b * size + i, else i * batch + b.
    """

    size: int
    batch: int
    inner: bool

    def one(self, x, is_batched):
        """An array [batch, ...], or [size, batch, ...] if batched."""
        x = x if is_batched else jnp.broadcast_to(x[None], (self.size, *x.shape))
        x = jnp.swapaxes(x, 0, 1) if self.inner else x
        return x.reshape(-1, *x.shape[2:])

    def shared(self, x, is_batched, repeat):
        """A shared operand: x [Bb, ...], or [size, Bb, ...] if batched."""
        if not is_batched and not repeat:
            return x
        if not self.inner:
            return self.one(x, is_batched)
        entries = x.shape[1 if is_batched else 0]
        whole = jnp.repeat(x, self.batch // entries, axis=1 if is_batched else 0)
        return self.one(whole, is_batched)

    def undone(self, x):
        """[size, batch, ...] of a result."""
        if not self.inner:
            return x.reshape(self.size, -1, *x.shape[1:])
        return jnp.swapaxes(x.reshape(-1, self.size, *x.shape[1:]), 0, 1)
