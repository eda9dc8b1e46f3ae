"""The deterministic backward, and that of wide heads: a kernel for dK and dV, one for dQ."""
