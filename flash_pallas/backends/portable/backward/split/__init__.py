"""The deterministic portable backward: a kernel for dK and dV, one for dQ."""
