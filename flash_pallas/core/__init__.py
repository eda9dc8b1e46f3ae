"""Definition of attention, traced inside every kernel. Imports jax and nothing above it."""
