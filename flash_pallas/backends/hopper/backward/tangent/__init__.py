"""Forward mode of the backward: the tangents of dQ, dK and dV."""
