"""Parts that all portable kernels share: tiles in shared memory, mma, softmax, auxiliary inputs."""
