"""Who is measured: name -> (forward, backward, results), or a sentence saying why not."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import importlib.util
import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import flash_pallas

from .gate import Inputs
from .suites import Cell
from .timing import Launch, torch_or_none

YARDSTICK = "torch_cudnn"


class Unsupported(Exception):
    """This provider cannot run this cell here; the message says why."""


@dataclasses.dataclass(frozen=True)
class Runner:
    """One provider, compiled and with its residuals saved, for one cell.

    Attributes:
        launches: what to time, by direction. The backward starts from saved residuals and includes
            everything it needs: delta, zeroed buffers, conversions.
        results: o, dq, dk, dv and, where the provider gives it, lse, in the layout of the public
            API; computed when called.
    """

    launches: dict[str, Launch]
    results: Callable[[], dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Provider:
    """One implementation of attention.

    Attributes:
        description: for the README's list.
        prepare: compiles for a cell, given the shapes of its inputs, and returns what makes a
            Runner of the inputs. Either raises Unsupported (or NotImplementedError) where it
            cannot. It uses no memory of the device, so that cells can be prepared side by side.
        directions: which are worth timing.
    """

    description: str
    prepare: Callable[[Cell, Inputs], Callable[[Inputs], Runner]]
    directions: tuple[str, ...] = ("forward", "backward")


def compile_jax(
    attention: Callable, like: Inputs, with_lse: Callable | None = None
) -> Callable[[Inputs], Runner]:
    """What makes a Runner of a differentiable jax function (q, k, v) -> o, compiled.

    The pullback of jax.vjp is a pytree of the residuals, so it is computed by one program and given
    to another, which is then the backward and nothing else.

    Args:
        attention: what is timed.
        like: arrays, or their shapes and dtypes.
        with_lse: (q, k, v) -> (o, lse) for the gate, where there is one.
    """
    *qkv, do = like
    primal = with_lse or (lambda *args: (attention(*args), None))
    save = jax.jit(lambda *args: jax.vjp(primal, *args, has_aux=True))
    _, residuals, _ = jax.eval_shape(save, *qkv)
    pull = jax.jit(lambda pullback, cotangent: pullback(cotangent))
    lowered = [jax.jit(attention).lower(*qkv), save.lower(*qkv), pull.lower(residuals, do)]
    # XLA and ptxas compile outside Python's lock: three programs in the time of the slowest.
    with concurrent.futures.ThreadPoolExecutor() as pool:
        programs = list(pool.map(lambda program: program.compile(), lowered))
    return functools.partial(_bind, *programs)


def _bind(forward, save, pull, inputs: Inputs) -> Runner:
    """The Runner of compiled programs on these inputs."""
    *qkv, do = inputs
    _, pullback, lse = save(*qkv)

    def results():
        found = dict(zip(("dq", "dk", "dv"), pull(pullback, do), strict=True))
        if lse is not None:
            found["lse"] = lse
        return {"o": forward(*qkv), **found}

    return Runner(
        {
            "forward": Launch(lambda: forward(*qkv), "jax"),
            "backward": Launch(lambda: pull(pullback, do), "jax"),
        },
        results,
    )


def prepare_flash_pallas(cell: Cell, like: Inputs, **arguments) -> Callable[[Inputs], Runner]:
    """Our kernels through the public functions."""
    arguments["causal"] = cell.causal
    return compile_jax(
        functools.partial(flash_pallas.flash_attention, **arguments),
        like,
        functools.partial(flash_pallas.flash_attention_with_lse, **arguments),
    )


def prepare_jax_nn(cell: Cell, like: Inputs, implementation: str) -> Callable[[Inputs], Runner]:
    """jax.nn.dot_product_attention."""
    if implementation == "cudnn" and jax.default_backend() != "gpu":
        raise Unsupported("cuDNN needs a GPU")
    if implementation == "xla":
        _refuse_dense(cell)
    attention = functools.partial(
        jax.nn.dot_product_attention, is_causal=cell.causal, implementation=implementation
    )
    return compile_jax(attention, like)


def _refuse_dense(cell: Cell) -> None:
    """The dense path keeps several [B, N, T, S] arrays in float32; four is a low count."""
    shape, stats = cell.shape, jax.local_devices()[0].memory_stats() or {}
    need = 4 * 4 * shape.batch * shape.q_heads * shape.q_len * shape.kv_len
    limit = stats.get("bytes_limit")
    if limit is not None and need > limit:
        raise Unsupported(f"the scores would take {need / 2**30:.0f} GiB")


def prepare_tokamax(cell: Cell, like: Inputs) -> Callable[[Inputs], Runner]:
    """Tokamax's Mosaic GPU kernels with its own choice of tiles."""
    if importlib.util.find_spec("tokamax") is None:
        raise Unsupported("tokamax is not installed")
    import tokamax

    # It warns of every shape that its tables lack: a kilobyte each, of every program.
    logging.getLogger("absl").setLevel(logging.ERROR)
    attention = functools.partial(
        tokamax.dot_product_attention, is_causal=cell.causal, implementation="mosaic"
    )
    return compile_jax(attention, like)


def prepare_triton(cell: Cell, like: Inputs) -> Callable[[Inputs], Runner]:
    """Our Triton kernel, called through jax-triton."""
    if jax.default_backend() != "gpu":
        raise Unsupported("Triton needs a GPU")
    try:
        import jax_triton  # noqa: F401

        from . import triton_baseline
    except (ImportError, AttributeError) as error:
        raise Unsupported(f"jax-triton cannot be imported: {error}") from error
    reason = triton_baseline.unsupported(cell.shape)
    if reason is not None:
        raise Unsupported(reason)
    with_lse = triton_baseline.make_attention(cell.shape, cell.causal)
    return compile_jax(lambda q, k, v: with_lse(q, k, v)[0], like, with_lse)


def prepare_torch(cell: Cell, like: Inputs, **arguments) -> Callable[[Inputs], Runner]:
    """Nothing to compile: cuDNN plans in the first call."""
    del like
    return functools.partial(torch_runner, cell, **arguments)


def torch_runner(
    cell: Cell,
    inputs: Inputs,
    contiguous_heads: bool = False,
    backend: str = "CUDNN_ATTENTION",
) -> Runner:
    """PyTorch's scaled_dot_product_attention on cuDNN, on the very same arrays.

    Torch wants [B, N, T, H]. It gets a transposed view of the [B, T, N, H] arrays, which is what a
    projection layer produces and which cuDNN reads as it is; with contiguous_heads, a copy in that
    order instead.
    """
    torch = torch_or_none()
    if torch is None:
        raise Unsupported("torch with a GPU is not installed")
    import torch.nn.attention

    def to_torch(x):
        x = torch.from_dlpack(x).transpose(1, 2)
        return (x.contiguous() if contiguous_heads else x).detach()

    q, k, v = (to_torch(x).requires_grad_() for x in inputs[:3])
    do = to_torch(inputs.do)
    grouped = cell.shape.q_heads != cell.shape.kv_heads
    attend = functools.partial(
        torch.nn.functional.scaled_dot_product_attention,
        is_causal=cell.causal,
        enable_gqa=grouped,
    )
    only = functools.partial(
        torch.nn.attention.sdpa_kernel, getattr(torch.nn.attention.SDPBackend, backend)
    )

    def forward():
        # Without gradients cuDNN need not write the log-sum-exp: the yardstick at its fastest.
        with only(), torch.no_grad():
            return attend(q, k, v)

    with only():
        o = attend(q, k, v)

    def backward():
        return torch.autograd.grad(o, (q, k, v), do, retain_graph=True)

    def results():
        tensors = dict(zip(("o", "dq", "dk", "dv"), (forward(), *backward()), strict=True))
        torch.cuda.synchronize()
        to_jax = lambda x: jnp.from_dlpack(x.detach().transpose(1, 2).contiguous())
        return {name: to_jax(x) for name, x in tensors.items()}

    return Runner(
        {"forward": Launch(forward, "torch"), "backward": Launch(backward, "torch")}, results
    )


_partial = functools.partial
PROVIDERS: dict[str, Provider] = {
    "torch_cudnn": Provider("PyTorch SDPA on cuDNN: the yardstick", prepare_torch),
    "torch_cudnn_bnth": Provider(
        "the same on contiguous [B, N, T, H] arrays", _partial(prepare_torch, contiguous_heads=True)
    ),
    "torch_flash": Provider(
        "PyTorch SDPA on its FlashAttention-2", _partial(prepare_torch, backend="FLASH_ATTENTION")
    ),
    "flash_pallas": Provider(
        "this package, Hopper kernels", _partial(prepare_flash_pallas, backend="hopper")
    ),
    "flash_pallas_deterministic": Provider(
        "this package, deterministic=True (same forward)",
        _partial(prepare_flash_pallas, backend="hopper", deterministic=True),
        ("backward",),
    ),
    "flash_pallas_xla": Provider(
        "this package's fallback for every device", _partial(prepare_flash_pallas, backend="xla")
    ),
    "jax_cudnn": Provider("jax.nn on cuDNN", _partial(prepare_jax_nn, implementation="cudnn")),
    "jax_xla": Provider("jax.nn, dense", _partial(prepare_jax_nn, implementation="xla")),
    "tokamax": Provider("Tokamax, Mosaic GPU, its own choice of tiles", prepare_tokamax),
    "triton_baseline": Provider(
        "our FlashAttention-2 in Triton through jax-triton", prepare_triton
    ),
}

DEFAULT_PROVIDERS = (
    "torch_cudnn",
    "flash_pallas",
    "flash_pallas_deterministic",
    "jax_cudnn",
    "jax_xla",
    "tokamax",
    "triton_baseline",
)
