"""A trained model on disk: its sizes as JSON, its parameters by Orbax."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import jax.numpy as jnp
import orbax.checkpoint as ocp
from flax import nnx
from model import ModelConfig, Transformer

_SIZES = "sizes.json"
_PARAMETERS = "parameters"


def save(folder: pathlib.Path, config: ModelConfig, params) -> None:
    """Writes the sizes and the parameters, over what is there.

    Args:
        folder: where to write; it is made if it does not exist.
        config: sizes of the model.
        params: parameters of the model, from nnx.split.
    """
    folder.mkdir(parents=True, exist_ok=True)
    sizes = dataclasses.asdict(config) | {"dtype": jnp.dtype(config.dtype).name}
    (folder / _SIZES).write_text(json.dumps(sizes, indent=1) + "\n")
    with ocp.StandardCheckpointer() as checkpointer:
        path = (folder / _PARAMETERS).absolute()
        checkpointer.save(path, nnx.to_pure_dict(params), force=True)


def exists(folder: pathlib.Path) -> bool:
    """Returns whether `save` has written there."""
    return (folder / _SIZES).exists() and (folder / _PARAMETERS).exists()


def load(folder: pathlib.Path, backend: str) -> Transformer:
    """Returns the saved model.

    Args:
        folder: a folder that `save` has written.
        backend: backend of flash_pallas, whichever the model was trained on.
    """
    sizes = json.loads((folder / _SIZES).read_text())
    sizes |= {"dtype": jnp.dtype(sizes["dtype"]), "backend": backend, "attention": "flash"}
    model = Transformer(ModelConfig(**sizes), nnx.Rngs(0))
    params = nnx.state(model, nnx.Param)
    with ocp.StandardCheckpointer() as checkpointer:
        path = (folder / _PARAMETERS).absolute()
        found = checkpointer.restore(path, nnx.to_pure_dict(params))
    nnx.replace_by_pure_dict(params, found)
    nnx.update(model, params)
    return model
