"""Code inside kernels that Pallas has no primitive for, written as MLIR or PTX.

inline       pieces of a tile in registers, votes, named barriers, words in device memory
infinities   a bias of -inf: found, marked, and cleared from weights
modifiers    positions, slopes and dropout masks of a tile
softcap      a hyperbolic tangent of few instructions
draft_bits   trees of drafts, a bit for each pair
elsewhere    what a kernel for a GPU that is not here asks the compiler
"""
