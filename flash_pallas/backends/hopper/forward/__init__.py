"""The forward kernel for Hopper: start reading at `kernel`."""
