"""The portable backward kernels."""
