"""Benchmarks: device time against other attention kernels, and peak memory. See README.md."""
