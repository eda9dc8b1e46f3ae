"""Transformations of jax around a backend: derivatives, vmap, sharding."""
