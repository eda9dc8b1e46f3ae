"""Minimises the energy of a lithium atom with an attention network as its wave function.

    python examples/laplacian.py

The network is a small PsiFormer (https://arxiv.org/abs/2211.13672): electrons are tokens, which
attend to each other, and determinants of their orbitals make the wave function antisymmetric. Its
kinetic energy is -(laplacian log psi + |grad log psi|^2) / 2, so every sample takes the trace of a
Hessian in the positions.
"""

from __future__ import annotations

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
EXACT = -7.478  # in hartree


class PsiFormer(nn.Module):
    """The logarithm of |psi| of electrons around a nucleus; the first UP have spin up."""

    layers: int = 2
    width: int = 32
    heads: int = 4
    attention: Callable = functools.partial(flash_attention, differentiable="any")

    @nn.compact
    def __call__(self, positions):
        """Returns a scalar, from positions [electrons, 3] in bohr."""
        count = positions.shape[0]
        radius = jnp.linalg.norm(positions, axis=-1, keepdims=True)
        spin = jnp.where(np.arange(count) < UP, 1.0, -1.0)[:, None]
        # Distances grow by their logarithm, so that electrons far away do not saturate the network.
        growth = jnp.log1p(radius) / radius
        x = jnp.concatenate([positions * growth, jnp.log1p(radius), spin], axis=-1)
        x = nn.Dense(self.width)(x)
        for _ in range(self.layers):
            qkv = nn.DenseGeneral((3, self.heads, self.width // self.heads))(x)
            o = self.attention(*jnp.unstack(qkv, axis=1))
            x = x + nn.DenseGeneral(self.width, axis=(-2, -1))(o)
            x = x + nn.tanh(nn.Dense(self.width)(x))
        # Orbitals fall off like those of hydrogen, in shells of two electrons.
        slopes = CHARGE / (1 + np.arange(count) // 2)
        slopes = self.param("slopes", lambda _: jnp.asarray(slopes, jnp.float32))
        orbitals = nn.Dense(count)(x) * jnp.exp(-radius * slopes[None])
        i, j = np.triu_indices(count, 1)
        apart = jnp.linalg.norm(positions[i] - positions[j], axis=-1)
        # The slope where two electrons meet, 1/4 for equal and 1/2 for opposite spins.
        cusp = jnp.where((i < UP) == (j < UP), 0.25, 0.5)
        return jnp.linalg.slogdet(orbitals)[1] - jnp.sum(cusp / (1 + apart))


def kinetic_energy(log_psi, positions, chunk: int):
    """Computes -(laplacian log psi + |grad log psi|^2) / 2.

    A forward Laplacian (https://arxiv.org/abs/2307.08214) carries all directions through the network
    at once and needs a rule for every primitive. Here the gradient is linearised, once, and its
    tangents along the 3 x electrons directions are taken: any function that has jvp will do.
    `chunk` directions are one batch, and the chunks are a scan: all at once are fastest, and take
    memory in proportion.

    Args:
        log_psi: function of positions [electrons, 3] to a scalar.
        positions: of one sample, [electrons, 3].
        chunk: number of directions that are computed at one time.
    """
    flat = positions.ravel()
    gradient = jax.grad(lambda flat: log_psi(flat.reshape(positions.shape)))
    slope, along = jax.linearize(gradient, flat)
    basis = jnp.eye(flat.size, dtype=flat.dtype)
    curvatures = jax.lax.map(lambda unit: along(unit) @ unit, basis, batch_size=chunk)
    return -(jnp.sum(curvatures) + slope @ slope) / 2


def potential_energy(positions):
    """Computes the Coulomb energy of positions [electrons, 3]."""
    i, j = np.triu_indices(positions.shape[0], 1)
    apart = jnp.linalg.norm(positions[i] - positions[j], axis=-1)
    return jnp.sum(1 / apart) - CHARGE * jnp.sum(1 / jnp.linalg.norm(positions, axis=-1))


def local_energies(log_psi, walkers, chunk: int):
    """Computes the local energy of every sample in walkers [samples, electrons, 3]."""
    energy = lambda x: kinetic_energy(log_psi, x, chunk) + potential_energy(x)
    return jax.vmap(energy)(walkers)


def metropolis(log_psi, walkers, key, moves: int = 10, width: float = 0.4):
    """Moves walkers [samples, electrons, 3] so that they are distributed as psi^2."""
    log_psi = jax.vmap(log_psi)

    def move(carry, key):
        walkers, current = carry
        keys = jax.random.split(key)
        proposed = walkers + width * jax.random.normal(keys[0], walkers.shape)
        new = log_psi(proposed)
        taken = jnp.log(jax.random.uniform(keys[1], new.shape)) < 2 * (new - current)
        walkers = jnp.where(taken[:, None, None], proposed, walkers)
        return (walkers, jnp.where(taken, new, current)), None

    start = walkers, log_psi(walkers)
    return jax.lax.scan(move, start, jax.random.split(key, moves))[0][0]


def main():
    """Minimises the energy by variational Monte Carlo and prints it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in {"steps": 200, "walkers": 256, "chunk": 9}.items():
        parser.add_argument(f"--{name}", type=int, default=default, help="default %(default)s")
    flags = parser.parse_args()
    key = jax.random.key(0)
    walkers = jax.random.normal(key, (flags.walkers, ELECTRONS, 3))
    model, optimizer = PsiFormer(), optax.adam(2e-3)
    params = jax.jit(model.init)(key, walkers[0])
    state = optimizer.init(params)

    @jax.jit
    def step(params, state, walkers, key):
        walkers = metropolis(functools.partial(model.apply, params), walkers, key)
        energies = local_energies(functools.partial(model.apply, params), walkers, flags.chunk)
        mean, middle = energies.mean(), jnp.median(energies)
        # A few samples near a node have huge energies, which would drown the others.
        spread = jnp.mean(jnp.abs(energies - middle))
        energies = jnp.clip(energies, middle - 5 * spread, middle + 5 * spread)
        weights = 2 * (energies - energies.mean()) / flags.walkers
        # The derivative of the mean energy: those of the local energies themselves cancel.
        of_params = lambda params: jax.vmap(functools.partial(model.apply, params))(walkers) @ weights
        updates, state = optimizer.update(jax.grad(of_params)(params), state)
        return optax.apply_updates(params, updates), state, walkers, mean

    for i in range(flags.steps):
        params, state, walkers, mean = step(params, state, walkers, jax.random.fold_in(key, i))
        if i % max(1, flags.steps // 10) == 0 or i == flags.steps - 1:
            print(f"step {i + 1}: energy {mean:.3f} hartree")
    print(f"exact: {EXACT} hartree")


if __name__ == "__main__":
    main()
