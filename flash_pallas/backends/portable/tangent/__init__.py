"""Forward mode of the portable kernels."""
