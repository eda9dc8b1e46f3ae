"""Other implementations of the calls in features.py."""

from __future__ import annotations

import functools
import importlib.util

import jax
import numpy as np

from . import flash_attention_3, timing
from .features import Sizes, Variant, packed_ids
from .programs import Program, compile_jax


class Unsupported(Exception):
    """Raised where a peer cannot run a call on this machine; the message says why."""


def _jax(implementation, variant, arrays, do):
    static = dict(variant.static)

    def attention(q, k, v, extra):
        return jax.nn.dot_product_attention(
            q, k, v, extra.get("bias"), is_causal="causal" in static, implementation=implementation
        )

    return compile_jax(attention, arrays, do, variant.differentiated)


def _tokamax(variant, arrays, do):
    if importlib.util.find_spec("tokamax") is None:
        raise Unsupported("tokamax is not installed")
    import tokamax

    static = dict(variant.static)

    def attention(q, k, v, extra):
        return tokamax.dot_product_attention(
            q, k, v, bias=extra.get("bias"), is_causal="causal" in static, implementation="mosaic"
        )

    return compile_jax(attention, arrays, do, variant.differentiated)


def fa3_attention(variant: Variant):
    """Returns FlashAttention-3's function (q, k, v, arrays) -> o for a variant."""

    def attention(q, k, v, arrays):
        arguments = dict(variant.static) | arrays
        # It wants a bound on the documents' lengths that is no array.
        longest = int(np.bincount(packed_ids(q.shape[1])).max())
        return flash_attention_3.attention(q, k, v, longest=longest, **arguments)

    return attention


def _fa3(variant, arrays, do):
    q, k, v, extra = arrays
    given = dict(variant.static) | extra
    reason = flash_attention_3.missing() or flash_attention_3.unsupported(q, k, v, given)
    if reason is not None:
        raise Unsupported(reason)
    return compile_jax(fa3_attention(variant), arrays, do, variant.differentiated)


def _torch(backend, variant, arrays, do):
    torch = timing.torch_or_none()
    if torch is None:
        raise Unsupported("torch with a GPU is not installed")
    import torch.nn.attention

    to_torch = lambda x: torch.from_dlpack(x).transpose(1, 2).detach()
    q, k, v = (to_torch(x).requires_grad_() for x in arrays[:3])
    cotangent = to_torch(do)
    backend = getattr(torch.nn.attention.SDPBackend, backend)
    attend = functools.partial(
        torch.nn.functional.scaled_dot_product_attention, is_causal="causal" in dict(variant.static)
    )

    def forward():
        with torch.nn.attention.sdpa_kernel(backend), torch.no_grad():
            return attend(q, k, v)

    with torch.nn.attention.sdpa_kernel(backend):
        o = attend(q, k, v)
    backward = lambda: torch.autograd.grad(o, (q, k, v), cotangent, retain_graph=True)
    launches = {
        "forward": timing.Launch(forward, "torch"),
        "backward": timing.Launch(backward, "torch"),
    }
    return Program(launches, dict.fromkeys(launches, 0))


def _flex(variant, arrays, do):
    """Compiles FlexAttention with the mask of a variant, whose blocks are found beforehand."""
    torch = timing.torch_or_none()
    if torch is None:
        raise Unsupported("torch with a GPU is not installed")
    import torch._functorch.config
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    # A backward that is timed runs more than once, and may not reuse the buffers it was given.
    torch._functorch.config.donated_buffer = False
    if variant.mod is None:
        raise Unsupported("the mask is no function of positions")
    to_torch = lambda x: torch.from_dlpack(x).transpose(1, 2).contiguous()
    q, k, v = (to_torch(x).requires_grad_() for x in arrays[:3])
    cotangent, length = to_torch(do), q.shape[2]
    sizes = Sizes(q.shape[0], length, q.shape[1], k.shape[1], q.shape[3], v.shape[3])
    mod = variant.mod(sizes, lambda x: torch.tensor(x, device="cuda"))
    mask = create_block_mask(mod, None, None, length, length, device="cuda", _compile=True)
    attend = torch.compile(flex_attention)

    def forward():
        with torch.no_grad():
            return attend(q, k, v, block_mask=mask)

    o = attend(q, k, v, block_mask=mask)
    backward = lambda: torch.autograd.grad(o, (q, k, v), cotangent, retain_graph=True)
    launches = {
        "forward": timing.Launch(forward, "torch"),
        "backward": timing.Launch(backward, "torch"),
    }
    return Program(launches, dict.fromkeys(launches, 0))


PEERS = {
    "fa3": _fa3,
    "flex": _flex,
    "jax_cudnn": functools.partial(_jax, "cudnn"),
    "jax_xla": functools.partial(_jax, "xla"),  # in float32 at its default precision, TF32
    "tokamax": _tokamax,
    "torch_cudnn": functools.partial(_torch, "CUDNN_ATTENTION"),
    "torch_efficient": functools.partial(_torch, "EFFICIENT_ATTENTION"),
}
# Functions (q, k, v, arrays) -> o of peers that pass the gate of a variant before they are timed.
GATED = {"fa3": fa3_attention}
