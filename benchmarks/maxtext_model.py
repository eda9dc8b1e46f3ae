"""A model of MaxText by its own configuration and code, for tests and for `run_client`."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

# A Llama of two layers; `run_client` has larger ones.
TINY = {
    "base_emb_dim": 32,
    "base_mlp_dim": 64,
    "base_num_query_heads": 4,
    "base_num_kv_heads": 2,
    "base_num_decoder_layers": 2,
    "head_dim": 16,
    "vocab_size": 64,
    "max_target_length": 32,
    "per_device_batch_size": 2.0,
    "dtype": "float32",
}


def model_of(**options: Any) -> tuple[Any, Callable[[Any], Any]]:
    """Returns a model of MaxText (nnx) and the loss of it on a batch of random tokens.

    Args:
        **options: fields of MaxText's configuration, besides those of `TINY`; `attention` names
            the kernel.
    """
    os.environ.setdefault("DECOUPLE_GCLOUD", "TRUE")  # nothing of Google Cloud is needed
    import maxtext
    import optax
    from flax import nnx
    from maxtext.common.common_types import MODEL_MODE_TRAIN
    from maxtext.configs import pyconfig
    from maxtext.models import models

    fields = TINY | {
        "run_name": "flash_pallas",
        "enable_checkpointing": False,
        "skip_jax_distributed_system": True,
        "dataset_type": "synthetic",
        "decoder_block": "llama2",
        "scan_layers": False,
        "matmul_precision": "default",
        "float32_logits": True,
        "float32_qk_product": True,
        "log_config": False,
        **options,
    }
    base = Path(maxtext.__file__).parent / "configs" / "base.yml"
    config = pyconfig.initialize(["flash_pallas", str(base)], **fields)
    names = tuple(config.mesh_axes)
    mesh = jax.make_mesh((1,) * len(names), names, devices=jax.devices()[:1])
    # As in MaxText's trainer: constraints of its layers name axes of the mesh.
    with jax.set_mesh(mesh):
        model = models.Transformer(config, mesh, quant=None, rngs=nnx.Rngs(params=0, dropout=1))
    shape = int(config.per_device_batch_size), config.max_target_length
    tokens = jax.random.randint(jax.random.key(2), shape, 1, config.vocab_size)
    positions = jnp.broadcast_to(jnp.arange(shape[1]), shape)

    def loss(model: Any) -> Any:
        logits = model(
            tokens,
            positions,
            decoder_segment_ids=jnp.ones(shape, jnp.int32),
            enable_dropout=False,
            model_mode=MODEL_MODE_TRAIN,
        ).astype(jnp.float32)
        found = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:])
        return found.mean()

    return model, loss
