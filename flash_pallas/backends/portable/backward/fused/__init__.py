"""The fused portable backward: one kernel for dQ, dK and dV."""
