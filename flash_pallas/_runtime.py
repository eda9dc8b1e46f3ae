"""Names the library that compiled kernels call, for programs that were exported.

XLA loads it from where MOSAIC_GPU_RUNTIME_LIB_PATH says, which jax sets as it imports Mosaic GPU.
A process that reads a program of jax.export traces no kernel, and need not import that (0.4 s).
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

VARIABLE = "MOSAIC_GPU_RUNTIME_LIB_PATH"
LIBRARY = "libmosaic_gpu_runtime.so"
PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")  # in the order in which jax looks for it


def name_library() -> None:
    """Sets the variable if it is not set and a CUDA plugin of jax has the library."""
    for plugin in PLUGINS:
        spec = importlib.util.find_spec(plugin)
        for folder in (spec and spec.submodule_search_locations) or ():
            library = Path(folder, LIBRARY)
            if library.exists():
                os.environ.setdefault(VARIABLE, str(library))
                return
