"""Parts of all Hopper kernels: pipelines, wgmma, auxiliary inputs, zero padding, clusters."""
