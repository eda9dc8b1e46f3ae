"""The backward kernels for Hopper; `select` says which of them run."""
