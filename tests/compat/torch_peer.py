"""Runs PyTorch for `torch_live.py`, by an interpreter that has torch and none of this package.

    python tests/compat/torch_peer.py REQUESTS ANSWERS

REQUESTS is a folder of `NAME.json`, what to do, and `NAME.npz`, arrays; ANSWERS gets `NAME.npz`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import bias, flex_attention


def of_sdpa(arrays, request):
    """Computes SDPA; returns {"o": ..., and the gradient of each float array under its name}."""
    for x in arrays.values():
        if x.is_floating_point():
            x.requires_grad_(True)
    o = F.scaled_dot_product_attention(**arrays, **request["options"])
    weights = torch.sin(7 * torch.arange(o.numel(), dtype=o.dtype)).reshape(o.shape)
    (o * weights).sum().backward()
    return {"o": o, **{n: x.grad for n, x in arrays.items() if x.requires_grad}}


def of_flex(arrays, request):
    """Computes FlexAttention with functions that are given as text; it has no gradient on a CPU."""
    names = {"xp": torch, **arrays}
    query, key, value = (arrays[n] for n in ("query", "key", "value"))
    score_mod, mask_mod = (
        request[n] and eval(f"lambda {first}b, h, q_idx, kv_idx: {request[n]}", names)
        for n, first in (("score", "score, "), ("mask", ""))
    )
    sizes = (*query.shape[:3], key.shape[2])
    mask = mask_mod and flex_attention.create_block_mask(mask_mod, *sizes, device="cpu")
    o, lse = flex_attention.flex_attention(
        query, key, value, score_mod, mask, return_lse=True, **request["options"]
    )
    return {"o": o, "lse": lse}


def of_code(arrays, request):
    """Runs code that assigns `out`."""
    names = {"torch": torch, "F": F, "causal_lower_right": bias.causal_lower_right, **arrays}
    names |= {n: getattr(flex_attention, n) for n in ("flex_attention", "create_block_mask")}
    exec(request["code"], names)
    return {"out": names["out"]}


KINDS = {"sdpa": of_sdpa, "flex": of_flex, "code": of_code}


def main(requests: Path, answers: Path) -> None:
    """Answers all requests of a folder."""
    for file in sorted(requests.glob("*.json")):
        request = json.loads(file.read_text())
        with np.load(file.with_suffix(".npz")) as stored:
            arrays = {n: torch.from_numpy(x.copy()) for n, x in stored.items()}
        found = KINDS[request["kind"]](arrays, request)
        made = {n: x.detach().numpy() for n, x in found.items()}
        np.savez(answers / f"{file.stem}.npz", **made, version=np.array(torch.__version__))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
