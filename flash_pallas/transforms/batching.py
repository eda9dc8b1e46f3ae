"""vmap of attention: the vmapped axis becomes part of the batch.

A kernel then sees one larger batch instead of one more grid axis. Operands that are not batched are
repeated, except a bias or a mask: entry b of a batch of B reads entry b // (B // Bb) of a bias of
Bb entries. So a bias shared by the entries of a member needs the members folded outermost, and one
shared by the members needs them innermost; the order is the one that repeats fewer bytes.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.sharding import AxisType

from ..core.decode import DecodeOperands

SHARED = ("bias", "mask")  # operands whose batch may be a divisor of the batch


def fold_vmap(call, wanted: frozenset[str] = frozenset()):
    """Wraps `call` so that a vmapped axis is folded into axis 0 of every argument and result.

    Args:
        call: (Operands, ...) -> a tree of arrays, all with the batch first.
        wanted: shared operands that `call` returns a gradient of: vmap wants one for each of its
            members, so these are repeated.
    """
    folding = custom_vmap(call)

    @folding.def_vmap
    def fold(axis_size, is_batched, operands, *rest):
        if not axis_size:
            out = of_no_members(call, is_batched, (operands, *rest))
            return out, jax.tree.map(lambda _: True, out)
        batch = operands.q.shape[1 if is_batched[0].q else 0]
        shared = {name: getattr(operands, name) for name in SHARED}
        # A gradient comes in its operand's own entries: those of an inner fold would be repeated.
        inner = wanted.isdisjoint(SHARED) and _inner_is_cheaper(
            axis_size, batch, shared, is_batched[0], tie=_may_be_cut(operands.q)
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


def of_no_members(call, is_batched, args):
    """Returns the results of a vmap of size 0: arrays without elements, in the shapes of `call`.

    Args:
        call: the function of one member.
        is_batched: says which of `args` have the vmapped axis, as their first.
        args: the arguments as vmap gives them.
    """
    member = lambda x, batched: jax.ShapeDtypeStruct(x.shape[1:] if batched else x.shape, x.dtype)
    shapes = jax.eval_shape(call, *jax.tree.map(member, args, tuple(is_batched)))
    return jax.tree.map(lambda x: jnp.zeros((0, *x.shape), x.dtype), shapes)


def _inner_is_cheaper(size: int, batch: int, shared, is_batched, tie: bool) -> bool:
    """Returns whether members' own biases and masks are smaller than copies of the shared ones."""
    outer_bytes = inner_bytes = 0
    for name, x in shared.items():
        if x is None:
            continue
        nbytes = x.size * x.dtype.itemsize
        if getattr(is_batched, name):
            inner_bytes += batch * nbytes // x.shape[1]
        elif len(x) > 1:
            outer_bytes += size * nbytes
    return tie if inner_bytes == outer_bytes else inner_bytes < outer_bytes


def _may_be_cut(q) -> bool:
    """Returns whether the partitioner may shard the batch.

    The batch stays sharded only if it is the outer of two folded axes.
    """
    return AxisType.Auto in jax.typeof(q).sharding.mesh.axis_types


@dataclasses.dataclass(frozen=True)
class _Fold:
    """Folding of `size` members with `batch` entries each into one batch.

    Attributes:
        size: size of the vmapped axis.
        batch: number of entries of each member.
        inner: True if entry b of member i becomes b * size + i, else it becomes i * batch + b.
    """

    size: int
    batch: int
    inner: bool

    def one(self, x, is_batched):
        """Folds an array [batch, ...], or [size, batch, ...] if batched."""
        x = x if is_batched else jnp.broadcast_to(x[None], (self.size, *x.shape))
        x = jnp.swapaxes(x, 0, 1) if self.inner else x
        return x.reshape(-1, *x.shape[2:])

    def shared(self, x, is_batched, repeat):
        """Folds a shared operand: x [Bb, ...], or [size, Bb, ...] if batched."""
        if not is_batched and not repeat and (self.inner or len(x) == 1):
            return x
        if not self.inner:
            return self.one(x, is_batched)
        whole = jnp.repeat(x, self.batch // x.shape[1], axis=1)
        return self.one(whole, is_batched)

    def undone(self, x):
        """Unfolds a result to [size, batch, ...]."""
        if not self.inner:
            return x.reshape(self.size, -1, *x.shape[1:])
        return jnp.swapaxes(x.reshape(-1, self.size, *x.shape[1:]), 0, 1)


def fold_decode(size: int, is_batched: DecodeOperands, operands: DecodeOperands) -> DecodeOperands:
    """Folds a vmapped axis into the operands of one call, as the outer batch.

    Pages that all members share are not repeated; members' own pages are concatenated, and the
    page tables are shifted to match.

    Args:
        size: size of the vmapped axis.
        is_batched: says which operands have it, as their first.
        operands: the operands as vmap gives them.
    """
    of_cache = ("k", "v", "k_scale", "v_scale")
    own_cache = any(getattr(is_batched, name) for name in of_cache)
    rows = operands.k.shape[1 if is_batched.k else 0]
    fold = _Fold(size, 0, inner=False)
    found = {}
    for name, x in operands._asdict().items():
        batched = getattr(is_batched, name)
        if x is None or (name in of_cache and operands.page_table is not None and not own_cache):
            found[name] = x
            continue
        if name in ("k_scale", "v_scale"):  # One row is for all.
            axis = 1 if batched else 0
            x = jnp.broadcast_to(x, (*x.shape[:axis], rows, x.shape[-1]))
        found[name] = fold.one(x, batched)
    if operands.page_table is not None and own_cache:
        table = jnp.clip(found["page_table"], 0, rows - 1)
        first = jnp.repeat(jnp.arange(size, dtype=jnp.int32) * rows, len(found["q"]) // size)
        found["page_table"] = table + first[:, None]
    return DecodeOperands(**found)
