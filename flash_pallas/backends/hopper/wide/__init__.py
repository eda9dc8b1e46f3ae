"""Kernels for head dims above 256: the columns of a result lie in two warpgroups."""
