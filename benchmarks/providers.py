"""The attention implementations that are measured, by name.

Each gives a forward, a backward and results for a cell, or a sentence that says why it cannot.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import logging
from collections.abc import Callable
from concurrent.futures import Executor

import jax
import jax.numpy as jnp

import flash_pallas

from . import flash_attention_3, tracing
from .gate import Inputs, input_shapes
from .suites import Cell
from .timing import Launch, torch_or_none
from .tracing import Attention
from .tracing import Runner as Runner

YARDSTICK = "torch_cudnn"
EARLIER = "flash_pallas_earlier"


class Unsupported(Exception):
    """Raised where a provider cannot run a cell on this machine; the message says why."""


@dataclasses.dataclass(frozen=True)
class Provider:
    """One implementation of attention. Its functions raise Unsupported, or NotImplementedError.

    Attributes:
        description: text for the README's list.
        attention: makes jax's function for a cell; None for another framework, which has `runner`.
        runner: makes a Runner of a cell and its inputs.
        directions: the passes that are worth timing.
    """

    description: str
    attention: Callable[[Cell], Attention] | None = None
    runner: Callable[[Cell, Inputs], Runner] | None = None
    directions: tuple[str, ...] = ("forward", "backward")


def prepare(
    name: str, cell: Cell, dtype, processes: Executor | None = None
) -> Callable[[Inputs], Runner]:
    """Compiles a provider's programs for a cell; returns a function from inputs to a Runner.

    It needs no memory of the device, so that many can be prepared in parallel.

    Args:
        name: a key of PROVIDERS.
        cell: what is computed.
        dtype: dtype of the inputs.
        processes: the processes that trace; without them, this one does.

    Raises:
        Unsupported, NotImplementedError: this provider cannot run this cell; says why.
    """
    provider = PROVIDERS[name]
    if provider.attention is None:
        return functools.partial(provider.runner, cell)
    if processes is not None:
        return tracing.compiled(_traced_by(processes, name, cell, dtype))
    return tracing.compiled(_lower(name, cell, dtype))


def _lower(name: str, cell: Cell, dtype) -> tracing.Programs:
    return tracing.lower(PROVIDERS[name].attention(cell), input_shapes(cell.shape, dtype))


def _traced_by(processes: Executor, name: str, cell: Cell, dtype) -> tracing.Programs:
    """Returns what `_lower` does, traced by another process, or here if that cannot export it."""
    try:
        return tracing.lower_exported(processes.submit(_export, name, cell, dtype).result())
    except (Unsupported, NotImplementedError):
        raise
    except Exception as error:  # jax.export refuses custom calls that tracing.py does not name
        reason = f"{type(error).__name__}: {error}"
        print(f"{name}, {cell.label}: traced here, since {reason}"[:300], flush=True)
        return _lower(name, cell, dtype)


def _export(name: str, cell: Cell, dtype) -> tracing.Programs:
    """Traces a provider's programs in a form that can be sent; `prepare` has it run elsewhere."""
    return tracing.export(PROVIDERS[name].attention(cell), input_shapes(cell.shape, dtype))


def flash_pallas_attention(cell: Cell, package=flash_pallas, **arguments) -> Attention:
    """Returns our kernels, called through the public functions."""
    arguments["causal"] = cell.causal
    return Attention(
        functools.partial(package.flash_attention, **arguments),
        functools.partial(package.flash_attention_with_lse, **arguments),
    )


def earlier_attention(cell: Cell, **arguments) -> Attention:
    """Returns another version of this package, which lies next to it as the package EARLIER."""
    if importlib.util.find_spec(EARLIER) is None:
        raise Unsupported(
            f"there is no package {EARLIER}: a copy of flash_pallas of another commit"
        )
    return flash_pallas_attention(cell, importlib.import_module(EARLIER), **arguments)


def jax_nn_attention(cell: Cell, implementation: str) -> Attention:
    """Returns jax.nn.dot_product_attention with this implementation, "cudnn" or "xla"."""
    if implementation == "cudnn" and jax.default_backend() != "gpu":
        raise Unsupported("cuDNN needs a GPU")
    if implementation == "xla":
        _refuse_dense(cell)
    return Attention(
        functools.partial(
            jax.nn.dot_product_attention, is_causal=cell.causal, implementation=implementation
        )
    )


def _refuse_dense(cell: Cell) -> None:
    """Raises Unsupported where the scores of the dense path exceed the device's memory.

    That path keeps several [B, N, T, S] arrays in float32; four is a low count.
    """
    shape, stats = cell.shape, jax.local_devices()[0].memory_stats() or {}
    need = 4 * 4 * shape.batch * shape.q_heads * shape.q_len * shape.kv_len
    limit = stats.get("bytes_limit")
    if limit is not None and need > limit:
        raise Unsupported(f"the scores would take {need / 2**30:.0f} GiB")


def tokamax_attention(cell: Cell) -> Attention:
    """Returns Tokamax's Mosaic GPU kernels with their own choice of tiles."""
    if importlib.util.find_spec("tokamax") is None:
        raise Unsupported("tokamax is not installed")
    import tokamax

    # It warns of every shape that its tables lack: a kilobyte each, of every program.
    logging.getLogger("absl").setLevel(logging.ERROR)
    return Attention(
        functools.partial(
            tokamax.dot_product_attention, is_causal=cell.causal, implementation="mosaic"
        )
    )


def triton_attention(cell: Cell) -> Attention:
    """Returns our Triton kernels, called through jax-triton."""
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
    return Attention(lambda q, k, v: with_lse(q, k, v)[0], with_lse)


def fa4_jax_attention(cell: Cell) -> Attention:
    """Returns FlashAttention-4 as fa4-jax calls it from JAX."""
    if importlib.util.find_spec("fa4_jax") is None:
        raise Unsupported("fa4-jax is not installed")
    import fa4_jax

    return Attention(functools.partial(fa4_jax.flash_attn, causal=cell.causal))


def fa3_attention(cell: Cell) -> Attention:
    """Returns FlashAttention-3 as dew-flash-attn calls it from JAX."""
    reason = flash_attention_3.missing()
    if reason is None:
        q, k, v, _ = input_shapes(cell.shape)
        reason = flash_attention_3.unsupported(q, k, v, {"causal": cell.causal})
    if reason is not None:
        raise Unsupported(reason)
    return Attention(functools.partial(flash_attention_3.attention, causal=cell.causal))


def fa4_runner(cell: Cell, inputs: Inputs) -> Runner:
    """Makes a Runner of FlashAttention-4, called from PyTorch, on the very same arrays.

    It takes [B, T, N, H] and GQA as they are.
    """
    torch = torch_or_none()
    if torch is None:
        raise Unsupported("torch with a GPU is not installed")
    try:
        from flash_attn.cute import flash_attn_func
    except ImportError as error:
        raise Unsupported(f"flash_attn.cute cannot be imported: {error}") from error
    q, k, v = (torch.from_dlpack(x).detach().requires_grad_() for x in inputs[:3])
    do = torch.from_dlpack(inputs.do)

    def attend():
        found = flash_attn_func(q, k, v, causal=cell.causal)
        return found[0] if isinstance(found, tuple) else found  # with the log-sum-exp

    def forward():
        with torch.no_grad():
            return attend()

    o = attend()
    backward = lambda: torch.autograd.grad(o, (q, k, v), do, retain_graph=True)

    def results():
        tensors = forward(), *backward()
        torch.cuda.synchronize()
        found = (jnp.from_dlpack(x.detach().contiguous()) for x in tensors)
        return dict(zip(("o", "dq", "dk", "dv"), found, strict=True))

    launches = {"forward": Launch(forward, "torch"), "backward": Launch(backward, "torch")}
    return Runner(launches, results)


def torch_runner(
    cell: Cell,
    inputs: Inputs,
    contiguous_heads: bool = False,
    backend: str = "CUDNN_ATTENTION",
) -> Runner:
    """Makes a Runner of PyTorch's scaled_dot_product_attention, on the very same arrays.

    It runs on cuDNN, or on another `backend`. Torch wants [B, N, T, H]. It gets a transposed view
    of the [B, T, N, H] arrays, which is what a projection layer produces and which cuDNN reads as
    it is; with contiguous_heads, it gets a copy in that order instead. The efficient backend has no
    GQA: it gets every head of keys as often as it is read, before it is timed, and is spared the
    sums of their gradients.
    """
    torch = torch_or_none()
    if torch is None:
        raise Unsupported("torch with a GPU is not installed")
    import torch.nn.attention

    def to_torch(x):
        x = torch.from_dlpack(x).transpose(1, 2)
        return (x.contiguous() if contiguous_heads else x).detach()

    members = cell.shape.q_heads // cell.shape.kv_heads
    repeated = members if backend == "EFFICIENT_ATTENTION" else 1
    of_keys = lambda x: to_torch(x).repeat_interleave(repeated, 1) if repeated > 1 else to_torch(x)
    sources = to_torch(inputs.q), of_keys(inputs.k), of_keys(inputs.v)
    q, k, v = (x.requires_grad_() for x in sources)
    do = to_torch(inputs.do)
    grouped = members != 1 and repeated == 1
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
        o, dq, *of_keys = forward(), *backward()
        if repeated > 1:
            of_keys = [x.unflatten(1, (-1, repeated)).sum(2) for x in of_keys]
        tensors = dict(zip(("o", "dq", "dk", "dv"), (o, dq, *of_keys), strict=True))
        torch.cuda.synchronize()
        to_jax = lambda x: jnp.from_dlpack(x.detach().transpose(1, 2).contiguous())
        return {name: to_jax(x) for name, x in tensors.items()}

    return Runner(
        {"forward": Launch(forward, "torch"), "backward": Launch(backward, "torch")}, results
    )


_partial = functools.partial
PROVIDERS: dict[str, Provider] = {
    "torch_cudnn": Provider("PyTorch SDPA on cuDNN: the yardstick", runner=torch_runner),
    "torch_cudnn_bnth": Provider(
        "the same on contiguous [B, N, T, H] arrays",
        runner=_partial(torch_runner, contiguous_heads=True),
    ),
    "torch_flash": Provider(
        "PyTorch SDPA on its FlashAttention-2",
        runner=_partial(torch_runner, backend="FLASH_ATTENTION"),
    ),
    "torch_efficient": Provider(
        "PyTorch SDPA on its memory-efficient attention, which takes any head dim",
        runner=_partial(torch_runner, backend="EFFICIENT_ATTENTION"),
    ),
    "flash_pallas": Provider(
        "this package, Hopper kernels", _partial(flash_pallas_attention, backend="hopper")
    ),
    EARLIER: Provider(
        "another version of it, to compare with in one process",
        _partial(earlier_attention, backend="hopper"),
    ),
    "flash_pallas_deterministic": Provider(
        "this package, deterministic=True (same forward)",
        _partial(flash_pallas_attention, backend="hopper", deterministic=True),
        directions=("backward",),
    ),
    "flash_pallas_portable": Provider(
        "this package, kernels for compute capability 8.0 and above",
        _partial(flash_pallas_attention, backend="portable"),
    ),
    "flash_pallas_xla": Provider(
        "this package's fallback for every device", _partial(flash_pallas_attention, backend="xla")
    ),
    "jax_cudnn": Provider("jax.nn on cuDNN", _partial(jax_nn_attention, implementation="cudnn")),
    "jax_xla": Provider("jax.nn, dense", _partial(jax_nn_attention, implementation="xla")),
    "fa3": Provider("FlashAttention-3 from JAX (dew-flash-attn)", fa3_attention),
    "fa4": Provider("FlashAttention-4 from PyTorch (flash_attn.cute)", runner=fa4_runner),
    "fa4_jax": Provider("FlashAttention-4 from JAX (fa4-jax)", fa4_jax_attention),
    "tokamax": Provider("Tokamax, Mosaic GPU, its own choice of tiles", tokamax_attention),
    "triton_baseline": Provider(
        "our FlashAttention-2 in Triton through jax-triton", triton_attention
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
