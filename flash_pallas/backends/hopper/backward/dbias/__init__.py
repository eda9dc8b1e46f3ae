"""The kernel for gradients of bias, ALiBi slopes and captured arrays."""
