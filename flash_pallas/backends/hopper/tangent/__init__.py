"""Forward mode: the tangents of O and of the log-sum-exp."""
