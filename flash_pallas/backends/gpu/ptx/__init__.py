"""Code inside kernels that Pallas has no primitive for, written as MLIR or PTX.

No other room has any. A kernel's file calls functions of tiles from here; those that take
`interpret` have a plain jnp form, which the interpreter runs.
"""
