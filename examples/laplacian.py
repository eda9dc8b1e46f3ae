"""Minimises the energy of a lithium atom, with an attention network for its wave function psi.

    python examples/laplacian.py

The network is a small PsiFormer (https://arxiv.org/abs/2211.13672): electrons are tokens that
attend to each other, and a determinant makes psi antisymmetric. Its kinetic energy is
-(laplacian log psi + |grad log psi|^2) / 2: the trace of a Hessian, for every sample of a step.
"""

import argparse
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from flash_pallas import flash_attention

CHARGE, UP, ELECTRONS = 3.0, 2, 3
EXACT = -7.478  # hartree


def distances(positions):
    """Returns the distances of all pairs of positions [electrons, 3], [pairs]."""
    i, j = np.triu_indices(positions.shape[0], 1)
    return jnp.linalg.norm(positions[i] - positions[j], axis=-1)


class PsiFormer(nn.Module):
    """The function log |psi| of electrons around a nucleus, of which the first UP have spin up."""

    layers: int = 2
    width: int = 32
    heads: int = 4
    attention: Callable = functools.partial(flash_attention, differentiable="any")

    @nn.compact
    def __call__(self, positions):
        """Returns a scalar, from positions [electrons, 3] in bohr."""
        count = positions.shape[0]
        up = np.arange(count) < UP
        radius = jnp.linalg.norm(positions, axis=-1, keepdims=True)
        # Distances by their logarithm: electrons far away do not saturate the network.
        growth = jnp.log1p(radius)
        spin = jnp.where(up, 1.0, -1.0)[:, None]
        x = jnp.concatenate([positions * growth / radius, growth, spin], axis=-1)
        x = nn.Dense(self.width)(x)
        for _ in range(self.layers):
            qkv = nn.DenseGeneral((3, self.heads, self.width // self.heads))(x)
            o = self.attention(*jnp.unstack(qkv, axis=1))
            x = x + nn.DenseGeneral(self.width, axis=(-2, -1))(o)
            x = x + nn.tanh(nn.Dense(self.width)(x))
        # Orbitals fall off as those of hydrogen do, two in a shell.
        slopes = CHARGE / (1 + np.arange(count) // 2)
        slopes = self.param("slopes", lambda _: jnp.asarray(slopes, jnp.float32))
        orbitals = nn.Dense(count)(x) * jnp.exp(-radius * slopes[None])
        # The slope of log |psi| where two electrons meet: 1/4 for equal spins, 1/2 for opposite.
        i, j = np.triu_indices(count, 1)
        cusps = jnp.where(up[i] == up[j], 0.25, 0.5) / (1 + distances(positions))
        return jnp.linalg.slogdet(orbitals)[1] - jnp.sum(cusps)


def kinetic_energy(log_psi, positions, chunk: int):
    """Computes -(laplacian log psi + |grad log psi|^2) / 2 of positions [electrons, 3].

    The gradient is linearised once. The tangents of a chunk of directions are one batch (`vmap`),
    and the chunks follow each other (`scan`): more at a time is faster and takes more memory. The
    forward Laplacian (https://arxiv.org/abs/2307.08214) saves work where directions share it, but
    needs a rule of its own for each operation; this needs forward mode only.
    """
    flat = positions.ravel()
    gradient = jax.grad(lambda flat: log_psi(flat.reshape(positions.shape)))
    slope, along = jax.linearize(gradient, flat)
    directions = jnp.eye(flat.size, dtype=flat.dtype)
    curvatures = jax.lax.map(lambda x: along(x) @ x, directions, batch_size=chunk)
    return -(jnp.sum(curvatures) + slope @ slope) / 2


def potential_energy(positions):
    """Computes the Coulomb energy of positions [electrons, 3]."""
    attraction = CHARGE * jnp.sum(1 / jnp.linalg.norm(positions, axis=-1))
    return jnp.sum(1 / distances(positions)) - attraction


def metropolis(log_psi, walkers, key, moves: int = 10, width: float = 0.4):
    """Moves walkers [samples, electrons, 3] so that they are distributed as psi^2."""

    def move(walkers, key):
        keys = jax.random.split(key)
        proposed = walkers + width * jax.random.normal(keys[0], walkers.shape)
        gain = 2 * (log_psi(proposed) - log_psi(walkers))
        taken = jnp.log(jax.random.uniform(keys[1], gain.shape)) < gain
        return jnp.where(taken[:, None, None], proposed, walkers), None

    return jax.lax.scan(move, walkers, jax.random.split(key, moves))[0]


def main():
    """Minimises the energy by variational Monte Carlo."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in {"steps": 200, "walkers": 256, "chunk": 9}.items():
        parser.add_argument(f"--{name}", type=int, default=default, help="default %(default)s")
    flags = parser.parse_args()
    model, optimizer = PsiFormer(), optax.adam(2e-3)
    walkers = jax.random.normal(jax.random.key(0), (flags.walkers, ELECTRONS, 3))
    params = jax.jit(model.init)(jax.random.key(1), walkers[0])
    state, log_psi = optimizer.init(params), jax.vmap(model.apply, (None, 0))

    @jax.jit
    def step(params, state, walkers, key):
        walkers = metropolis(functools.partial(log_psi, params), walkers, key)
        of_one = functools.partial(model.apply, params)
        local = lambda x: kinetic_energy(of_one, x, flags.chunk) + potential_energy(x)
        energies = jax.vmap(local)(walkers)
        mean, middle = energies.mean(), jnp.median(energies)
        # Next to a node of psi energies are huge: a few samples would drown the others.
        spread = 5 * jnp.mean(jnp.abs(energies - middle))
        clipped = jnp.clip(energies, middle - spread, middle + spread)
        excess = clipped - clipped.mean()
        # As the Hamiltonian is Hermitian, the gradient of the mean energy has no third derivatives:
        # it is twice the covariance of the energy with the gradient of log |psi|.
        grads = jax.grad(lambda params: 2 * jnp.mean(excess * log_psi(params, walkers)))(params)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(params, updates), state, walkers, mean

    for i, key in enumerate(jax.random.split(jax.random.key(2), flags.steps), 1):
        params, state, walkers, mean = step(params, state, walkers, key)
        if i % max(1, flags.steps // 10) == 0:
            print(f"step {i}: energy {mean:.3f} hartree")
    print(f"exact: {EXACT} hartree")


if __name__ == "__main__":
    main()
