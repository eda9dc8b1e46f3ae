"""Programs exported on a host without a GPU, run on the GPU and compared with float64.

    python -m tests.exported --write FOLDER    where JAX has a CPU only
    python -m tests.exported --check FOLDER    where the GPU is, an H200

Each program is a call and its gradient, for the kernels of an H200 or for the portable ones there.
The second command knows nothing of attention but `dense`: plain numpy, of a mask as the call means.
Its exit status is 1 if a program is missing, cannot be loaded or is wrong.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import flash_pallas as fp

GPU = "H200"
BACKENDS = ("hopper", "portable")
# Of 16-bit inputs, relative to the largest element: several roundings of 2**-9 of what is summed.
BOUND = 2.0**-6


@dataclasses.dataclass(frozen=True)
class Call:
    """A call that is exported.

    Attributes:
        run: (backend, *arrays) -> o, by the package.
        dense: arrays of float64 -> o, in numpy-like code that jax.vjp differentiates.
        shapes: shapes of the arrays, bfloat16.
        moving: number of the arrays, from the first, whose gradients are exported too.
    """

    run: Callable
    dense: Callable
    shapes: tuple[tuple[int, ...], ...]
    moving: int = 3


def dense(q, k, v, bias=None, sees=None):
    """Computes attention of [B, T, N, H] with all weights; `sees` is bool[T, S] or [B, 1, T, S]."""
    k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) / math.sqrt(q.shape[-1])
    scores = scores if bias is None else scores + bias
    scores = scores if sees is None else jnp.where(sees, scores, -jnp.inf)
    weights = jnp.exp(scores - scores.max(-1, keepdims=True))
    return jnp.einsum("bnts,bsnh->btnh", weights / weights.sum(-1, keepdims=True), v)


def _causal(t: int) -> Any:
    return np.tril(np.ones((t, t), bool))


def _attend(backend, q, k, v):
    return fp.flash_attention(q, k, v, causal=True, backend=backend)


def _biased(backend, q, k, v, bias):
    return fp.flash_attention(q, k, v, bias=bias, backend=backend)


ENDS = np.array([0, 100, 101, 384], np.int32)
LENGTHS = np.array([1000, 17], np.int32)
PAGES = np.arange(16, dtype=np.int32).reshape(2, 8)[:, ::-1]
PAGE_LENGTHS, NEW = np.array([500, 77], np.int32), np.array([0, 300, 301], np.int32)


def _packed(backend, q, k, v):
    return fp.flash_attention_varlen(q, k, v, cu_seqlens_q=ENDS, causal=True, backend=backend)


def _dense_packed(q, k, v):
    document = np.searchsorted(ENDS, np.arange(ENDS[-1]), side="right")
    sees = _causal(len(document)) & (document[:, None] == document)
    return dense(q[None], k[None], v[None], sees=sees)[0]


def _decoded(backend, q, k, v):
    return fp.flash_decode(q, k, v, kv_lengths=LENGTHS, backend=backend)


def _dense_decoded(q, k, v):
    sees = np.arange(k.shape[1]) < LENGTHS[:, None, None, None]
    return dense(q, k, v, sees=sees)


def _ragged(backend, q, k, v):
    places = {"kv_lengths": PAGE_LENGTHS, "page_table": PAGES, "cu_q_lens": NEW}
    return fp.ragged_paged_attention(q, k, v, backend=backend, **places)


def _dense_ragged(q, k, v):
    parts = []
    for i, length in enumerate(PAGE_LENGTHS):
        rows = q[NEW[i] : NEW[i + 1]]
        keys, values = (x[PAGES[i]].reshape(-1, *x.shape[2:])[:length] for x in (k, v))
        sees = np.arange(length) <= np.arange(len(rows))[:, None] + length - len(rows)
        parts.append(dense(rows[None], keys[None], values[None], sees=sees)[0])
    return jnp.concatenate(parts)


_OF_PAGES = (16, 64, 2, 128)
CALLS = {
    "causal": Call(_attend, lambda *x: dense(*x, sees=_causal(512)), ((2, 512, 4, 128),) * 3),
    "gqa": Call(
        _attend,
        lambda *x: dense(*x, sees=_causal(384)),
        ((2, 384, 8, 64), (2, 384, 2, 64), (2, 384, 2, 64)),
    ),
    "head dim 256": Call(_attend, lambda *x: dense(*x, sees=_causal(256)), ((1, 256, 2, 256),) * 3),
    "bias": Call(_biased, dense, (*((2, 256, 2, 64),) * 3, (1, 2, 256, 256)), moving=4),
    "packed": Call(_packed, _dense_packed, ((384, 4, 64),) * 3),
    "decode": Call(
        _decoded, _dense_decoded, ((2, 1, 8, 128), (2, 1024, 2, 128), (2, 1024, 2, 128)), 0
    ),
    "ragged": Call(_ragged, _dense_ragged, ((301, 8, 128), _OF_PAGES, _OF_PAGES), 0),
}


def _with_gradients(call: Call, run: Callable) -> Callable:
    """Returns (cotangent, *arrays) -> o and the gradients of the moving arrays."""

    def both(cotangent, *arrays):
        moving, fixed = arrays[: call.moving], arrays[call.moving :]
        o, pull = jax.vjp(lambda *moving: run(*moving, *fixed), *moving)
        return (o, *pull(cotangent.astype(o.dtype)))

    return both if call.moving else lambda _, *arrays: (run(*arrays),)


def _arrays(call: Call) -> list[Any]:
    """Returns random numbers of bfloat16 as float32: a cotangent of o, and the arrays."""
    random = np.random.default_rng(len(call.shapes[0]) * call.shapes[0][0])
    shapes = (*call.shapes[:1], *call.shapes)
    normal = (random.standard_normal(shape).astype(np.float32) for shape in shapes)
    return [np.asarray(jnp.asarray(x, jnp.bfloat16), np.float32) for x in normal]


def _path(folder: Path, backend: str, name: str) -> Path:
    return folder / f"{backend}_{name.replace(' ', '_')}.bin"


def write(folder: Path, names=tuple(CALLS), platforms=("cuda",)) -> None:
    """Exports calls, for all backends, into files of a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        call = CALLS[name]
        arrays = [jax.ShapeDtypeStruct(x.shape, jnp.bfloat16) for x in _arrays(call)]
        for backend in BACKENDS:
            run = _with_gradients(call, lambda *x, b=backend, c=call: c.run(b, *x))
            with fp.target(GPU):
                program = jax.export.export(jax.jit(run), platforms=platforms)(*arrays)
            assert "mosaic_gpu" in program.mlir_module()
            _path(folder, backend, name).write_bytes(program.serialize())
            print(f"{backend} {name}: written", flush=True)


def check(folder: Path, names=tuple(CALLS)) -> dict[str, dict[str, Any]]:
    """Runs what `write` has left on the device here; returns the errors by backend and call."""
    found = {}
    for name in names:
        call, arrays = CALLS[name], _arrays(CALLS[name])
        with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
            exact = [jnp.asarray(x, jnp.float64) for x in arrays]
            wanted = [np.asarray(x) for x in _with_gradients(call, call.dense)(*exact)]
        for backend in BACKENDS:
            program = jax.export.deserialize(bytearray(_path(folder, backend, name).read_bytes()))
            got = program.call(*(jnp.asarray(x, jnp.bfloat16) for x in arrays))
            errors = [
                float(np.abs(np.asarray(x, np.float64) - y).max() / np.abs(y).max())
                for x, y in zip(got, wanted, strict=True)
            ]
            right = all(error <= BOUND for error in errors)  # False for a NaN
            found[f"{backend} {name}"] = {"right": right, "errors": errors}
            print(f"{backend} {name}: {'right' if right else 'WRONG'}, {errors}", flush=True)
    return found


def main() -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    either = parser.add_mutually_exclusive_group(required=True)
    either.add_argument("--write", type=Path, metavar="FOLDER")
    either.add_argument("--check", type=Path, metavar="FOLDER")
    parser.add_argument("--json", type=Path, help="where to write what was found")
    given = parser.parse_args()
    if given.write:
        write(given.write)
        return 0
    found = check(given.check)
    record = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "programs": found}
    if given.json:
        given.json.write_text(json.dumps(record, indent=1) + "\n")
    return int(not all(each["right"] for each in found.values()))


if __name__ == "__main__":
    sys.exit(main())
