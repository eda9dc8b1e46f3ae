"""The split-KV decode kernel for Hopper; start reading at `kernel`."""
