"""The portable kernels for gradients of bias, ALiBi slopes and captured arrays."""
