"""The fused backward: one kernel for dQ, dK and dV; start reading at `kernel`."""
