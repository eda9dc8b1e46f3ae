"""A Llama-like transformer and its training step, on one device or sharded over a mesh.

It is plain jax: parameters are a dict of float32 arrays whose layers are stacked, activations are
bfloat16, each layer is rematerialized, and the cross-entropy goes through the tokens chunk by
chunk, so that the logits of a long sequence need not fit into memory. AdamW with a clipped norm.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from flash_pallas import save_attention
from flash_pallas.parallel import to_zigzag

THETA = 500_000.0
# AdamW: learning rate, moments, weight decay, and the norm that gradients are clipped to.
RATE, BETAS, EPSILON, DECAY, NORM = 3e-4, (0.9, 0.95), 1e-8, 0.1, 1.0
CHUNK = 4096  # tokens of a device whose logits exist at one time: 0.5 GB at 32,000 words


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of the model and how it is compiled.

    Attributes:
        layers: number of layers.
        width: width of the residual stream.
        heads: query heads.
        kv_heads: heads of keys and values.
        head_dim: size of a head.
        hidden: width of the MLP.
        vocabulary: number of words; embedding and head are separate tables.
        dtype: dtype to compute in.
        scan: layers are a `lax.scan`, else a loop of Python, which is compiled layer by layer.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    vocabulary: int
    dtype: Any = jnp.bfloat16
    scan: bool = True

    @property
    def matmul_parameters(self) -> int:
        """Number of parameters that a token is multiplied with: all but norms and embedding."""
        attention = 2 * self.width * (self.heads + self.kv_heads) * self.head_dim
        per_layer = attention + 3 * self.width * self.hidden
        return self.layers * per_layer + self.width * self.vocabulary


SIZES = {
    "1b": Config(22, 2048, 16, 4, 128, 5632, 32_000),
    "small": Config(12, 768, 6, 2, 128, 2048, 32_000),
    "tiny": Config(2, 64, 4, 2, 16, 128, 256),
}

# How each parameter lies at rest, by mesh axis and without the axis of layers. In use, what "fsdp"
# shards is whole.
AT_REST = {
    "embed": ("fsdp", "model"),
    "head": ("fsdp", "model"),
    "norm": (None,),
    "attention_norm": (None,),
    "mlp_norm": (None,),
    "q": ("fsdp", "model", None),
    "k": ("fsdp", "model", None),
    "v": ("fsdp", "model", None),
    "out": ("model", None, "fsdp"),
    "gate": ("fsdp", "model"),
    "up": ("fsdp", "model"),
    "down": ("model", "fsdp"),
}
OF_LAYERS = ("attention_norm", "mlp_norm", "q", "k", "v", "out", "gate", "up", "down")


@dataclasses.dataclass(frozen=True)
class Layout:
    """Shardings of all arrays, by axes of a mesh that are named as in real programs.

    "data" and "fsdp" shard the batch, "context" or "sequence" the sequence, "model" heads, hidden
    units and words, "fsdp" also parameters at rest.

    Attributes:
        mesh: the mesh, None on one device.
        zigzag: sequences lie in zigzag layout.
    """

    mesh: jax.sharding.Mesh | None = None
    zigzag: bool = False

    def axes(self, *names: str) -> tuple[str, ...]:
        """Returns those of the names that the mesh has."""
        return tuple(n for n in names if self.mesh is not None and n in self.mesh.axis_names)

    def size(self, *names: str) -> int:
        """Returns the number of devices along these axes."""
        return math.prod(self.mesh.shape[n] for n in self.axes(*names)) if self.mesh else 1

    @property
    def rows(self) -> tuple[Any, Any]:
        """The axes of batch and sequence."""
        return self.axes("data", "fsdp") or None, self.axes("context", "sequence") or None

    @property
    def explicit(self) -> bool:
        """True if shardings are part of types."""
        return self.mesh is not None and AxisType.Explicit in self.mesh.axis_types

    def spec(self, *parts: Any) -> P:
        """Returns a spec of these parts, without the axes that the mesh lacks."""
        kept = (self.axes(p) or None if isinstance(p, str) else p for p in parts)
        return P(*(p[0] if isinstance(p, tuple) and len(p) == 1 else p for p in kept))

    def put(self, x, *parts):
        """Shards an array so."""
        if self.mesh is None:
            return x
        if self.explicit:
            return jax.sharding.reshard(x, self.spec(*parts))
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, self.spec(*parts)))

    def einsum(self, formula: str, x, w, *parts):
        """Computes an einsum whose result is sharded so."""
        if self.explicit:
            return jnp.einsum(formula, x, w, out_sharding=self.spec(*parts))
        return self.put(jnp.einsum(formula, x, w), *parts)

    def at_rest(self, name: str) -> P:
        """Returns the spec of a parameter between steps."""
        return self.spec(*([None] if name in OF_LAYERS else []), *AT_REST[name])

    def use(self, name: str, w, dtype):
        """Gathers what "fsdp" shards of a parameter of one layer, matrices in this dtype."""
        w = w if w.ndim == 1 else w.astype(dtype)
        return self.put(w, *(None if axis == "fsdp" else axis for axis in AT_REST[name]))

    def shardings(self, tree):
        """Returns the sharding of every leaf of a dict of dicts whose last keys are parameters."""

        def of(path, _):
            name = next((k.key for k in reversed(path) if getattr(k, "key", "") in AT_REST), None)
            spec = P() if name is None else self.at_rest(name)
            return None if self.mesh is None else NamedSharding(self.mesh, spec)

        return jax.tree.map_with_path(of, tree)


def initial_parameters(config: Config, key) -> dict[str, Any]:
    """Draws parameters in float32; those of layers have an axis of layers in front."""
    c, heads = config, (config.heads, config.head_dim)
    keys = (c.kv_heads, c.head_dim)
    shapes = {"embed": (c.vocabulary, c.width), "head": (c.width, c.vocabulary)}
    inner = {"q": (c.width, *heads), "k": (c.width, *keys), "v": (c.width, *keys)}
    inner |= {"out": (*heads, c.width), "down": (c.hidden, c.width)}
    inner |= dict.fromkeys(("gate", "up"), (c.width, c.hidden))
    shapes |= {name: (c.layers, *shape) for name, shape in inner.items()}
    numbered = zip(shapes.items(), jax.random.split(key, len(shapes)), strict=True)
    drawn = {name: 0.02 * jax.random.normal(k, shape) for (name, shape), k in numbered}
    ones = {"norm": jnp.ones(c.width)}
    ones |= {n: jnp.ones((c.layers, c.width)) for n in ("attention_norm", "mlp_norm")}
    return drawn | ones


def initial_state(config: Config, seed: int = 0) -> dict[str, Any]:
    """Returns parameters, both moments of AdamW and the number of steps."""
    parameters = initial_parameters(config, jax.random.key(seed))
    zeros = lambda: jax.tree.map(jnp.zeros_like, parameters)
    return {"parameters": parameters, "mean": zeros(), "square": zeros(), "steps": jnp.int32(0)}


def batch_of(config: Config, batch: int, length: int, layout: Layout, seed: int = 1):
    """Draws tokens, and their successors and positions, [B, T] each, in the layout's order."""
    drawn = jax.random.randint(jax.random.key(seed), (batch, length + 1), 0, config.vocabulary)
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))
    found = {"tokens": drawn[:, :-1], "targets": drawn[:, 1:], "positions": positions}
    if layout.zigzag:
        shards = layout.size("context", "sequence")
        found = jax.tree.map(lambda x: to_zigzag(x, shards), found)
    if layout.mesh is None:
        return found
    return jax.device_put(found, NamedSharding(layout.mesh, layout.spec(*layout.rows)))


def normalized(x, scale):
    """Computes RMSNorm in float32, the result in x's dtype."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + 1e-5)
    return (wide * scale.reshape((1,) * (x.ndim - 1) + (-1,))).astype(x.dtype)


def rotated(x, positions):
    """Applies rotary positions [B, T] to x [B, T, N, H]."""
    half = x.shape[-1] // 2
    rates = THETA ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions.astype(jnp.float32)[:, :, None, None] * rates.reshape(1, 1, 1, -1)
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    first, second = (y.astype(jnp.float32) for y in jnp.split(x, 2, axis=-1))
    turned = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def layer(config: Config, layout: Layout, attend: Callable, x, weights, positions):
    """Applies one layer to x [B, T, width]."""
    weights = {name: layout.use(name, w, config.dtype) for name, w in weights.items()}
    rows = layout.rows
    y = normalized(x, weights["attention_norm"])
    by_heads = functools.partial(layout.einsum, "btd,dnh->btnh")
    q, k, v = (by_heads(y, weights[n], *rows, "model", None) for n in "qkv")
    o = attend(rotated(q, positions), rotated(k, positions), v)
    x = x + layout.einsum("btnh,nhd->btd", o, weights["out"], *rows, None)
    y = normalized(x, weights["mlp_norm"])
    gate, up = (layout.einsum("btd,df->btf", y, weights[n], *rows, "model") for n in ("gate", "up"))
    return x + layout.einsum("btf,fd->btd", jax.nn.silu(gate) * up, weights["down"], *rows, None)


def chunks_of(tokens: int, length: int) -> int:
    """Returns how many chunks of at most CHUNK tokens a device's sequences are divided into."""
    count = max(1, -(-tokens // CHUNK))
    while length % count:
        count += 1
    return count


def cross_entropy(layout: Layout, x, head, targets):
    """Computes the mean over x [B, T, width] of the loss of targets [B, T], chunk by chunk.

    Each device divides its own part of the sequence, so that no chunk moves between devices.
    """
    (batch, length, _), (rows, sequence) = x.shape, layout.rows
    shards = layout.size("context", "sequence")
    own = length // shards
    count = chunks_of(batch * own // layout.size("data", "fsdp"), own)

    def divided(a):
        shape = (batch, shards, count, own // count, *a.shape[2:])
        parts = (rows, sequence, *[None] * (len(shape) - 2))
        if layout.explicit:
            a = jax.lax.reshape(a, shape, out_sharding=layout.spec(*parts))
        else:
            a = layout.put(a.reshape(shape), *parts)
        return jnp.moveaxis(a, 2, 0)

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def add(total, chunk):
        x, targets = chunk
        logits = layout.einsum("bstd,dv->bstv", x, head, rows, sequence, None, "model")
        logits = logits.astype(jnp.float32)
        # A sum and no lookup: the words of a device are compared with the target.
        words = jax.lax.broadcasted_iota(jnp.int32, (1, 1, 1, head.shape[-1]), 3)
        words = layout.put(words, None, None, None, "model")
        chosen = jnp.where(words == targets[..., None], logits, 0.0).sum(-1)
        return total + jnp.sum(jax.nn.logsumexp(logits, axis=-1) - chosen), None

    total, _ = jax.lax.scan(add, jnp.float32(0), (divided(x), divided(targets)))
    return total / (batch * length)


def loss_of(config: Config, layout: Layout, attend: Callable, policy, parameters, batch):
    """Computes the loss of the next token.

    Args:
        config: sizes.
        layout: how arrays are sharded.
        attend: attention (q, k, v) -> o, causal, of [B, T, N, H].
        policy: what `jax.checkpoint` keeps of a layer, besides its input.
        parameters: as initial_parameters makes them.
        batch: as batch_of makes it.
    """
    embed = layout.use("embed", parameters["embed"], config.dtype)
    if layout.explicit:
        parts = layout.spec(*layout.rows, "model")
        x = embed.at[batch["tokens"]].get(out_sharding=parts)
    else:
        x = layout.put(embed[batch["tokens"]], *layout.rows, "model")
    x = layout.put(x, *layout.rows, None)

    @functools.partial(jax.checkpoint, policy=policy, prevent_cse=not config.scan)
    def one(x, weights):
        return layer(config, layout, attend, x, weights, batch["positions"]), None

    layers = {name: parameters[name] for name in OF_LAYERS}
    if config.scan:
        x, _ = jax.lax.scan(one, x, layers)
    else:
        for i in range(config.layers):
            x, _ = one(x, jax.tree.map(lambda w, i=i: w[i], layers))
    x = normalized(x, layout.use("norm", parameters["norm"], config.dtype))
    head = layout.use("head", parameters["head"], config.dtype)
    return cross_entropy(layout, x, head, batch["targets"])


def updated(state, gradients):
    """Returns the state after a step of AdamW, and the norm of the gradients."""
    norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(gradients)))
    small = jnp.minimum(1.0, NORM / norm)
    steps = state["steps"] + 1
    first, second = (1 - beta ** steps.astype(jnp.float32) for beta in BETAS)

    def one(p, g, m, s):
        g = g * small
        m = BETAS[0] * m + (1 - BETAS[0]) * g
        s = BETAS[1] * s + (1 - BETAS[1]) * g**2
        move = (m / first) / (jnp.sqrt(s / second) + EPSILON) + DECAY * p
        return p - RATE * move, m, s

    old = [state[name] for name in ("parameters", "mean", "square")]
    found = jax.tree.map(one, old[0], gradients, *old[1:])
    pick = lambda i: jax.tree.map(lambda x: x[i], found, is_leaf=lambda x: isinstance(x, tuple))
    return {"parameters": pick(0), "mean": pick(1), "square": pick(2), "steps": steps}, norm


def step_of(config: Config, layout: Layout, attend: Callable, policy=None):
    """Returns the jitted (state, batch) -> (state, (loss, norm of gradients)), state donated."""

    def step(state, batch):
        loss = functools.partial(loss_of, config, layout, attend, policy)
        value, gradients = jax.value_and_grad(loss)(state["parameters"], batch)
        state, norm = updated(state, gradients)
        return state, (value, norm)

    if layout.mesh is None:
        return jax.jit(step, donate_argnums=0)
    state = layout.shardings(jax.eval_shape(functools.partial(initial_state, config)))
    return jax.jit(step, donate_argnums=0, out_shardings=(state, None))


def state_maker(config: Config, layout: Layout, seed: int = 0) -> Callable[[], dict[str, Any]]:
    """Returns a jitted function that makes the initial state where it lies."""
    make = functools.partial(initial_state, config, seed)
    if layout.mesh is None:
        return jax.jit(make)
    return jax.jit(make, out_shardings=layout.shardings(jax.eval_shape(make)))


def keeps_attention(primitive, *operands, **params) -> bool:
    """Says, as a policy of `jax.checkpoint`, to keep the results of attention: ours and cuDNN's.

    cuDNN's have no names to save them by, but its forward is a primitive of its own.
    """
    if primitive.name.startswith("dot_product_attention_fwd"):
        return True
    return save_attention(primitive, *operands, **params)
