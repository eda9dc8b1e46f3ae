"""Dtypes and head dims that all portable kernels require of their operands."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from .tiles import UNIT_ELEMENTS

DTYPES = (np.dtype(jnp.bfloat16), np.dtype(jnp.float16))
HEAD_DIM_MULTIPLE = UNIT_ELEMENTS  # rows are copied in whole units
