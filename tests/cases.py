"""Named problems, one per feature and per edge. Every numerical test draws from this table."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from flash_pallas import validate
from flash_pallas.arguments import Arguments


class Inputs(NamedTuple):
    """Operands and the cotangents of both outputs."""

    q: Any
    k: Any
    v: Any
    do: Any
    dlse: Any


@dataclasses.dataclass(frozen=True)
class Case:
    """One problem, in jax.nn's letters; a tuple q_offset is an int32 array, one per batch."""

    name: str
    T: int
    S: int
    B: int = 1
    N: int = 2
    K: int = 2
    H: int = 64
    Hv: int | None = None
    dtype: str = "float32"
    causal: bool = False
    q_offset: int | tuple[int, ...] = 0
    scale: float | None = None
    deterministic: bool = False

    def __str__(self):
        return self.name

    @property
    def v_head_dim(self) -> int:
        return self.H if self.Hv is None else self.Hv

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments that both the oracle and `flash_attention` take."""
        offset = self.q_offset
        if isinstance(offset, tuple):
            offset = jnp.asarray(offset, jnp.int32)
        return {"causal": self.causal, "scale": self.scale, "q_offset": offset}

    @property
    def problem(self):
        x = self.inputs()
        arguments = Arguments(**self.arguments, deterministic=self.deterministic)
        return validate.canonicalize(x.q, x.k, x.v, arguments).problem

    def inputs(self, seed: int = 0) -> Inputs:
        """Normally distributed, cotangents too: ones would hide errors of the softmax."""
        draw = np.random.default_rng(seed).standard_normal
        dtype = jnp.dtype(self.dtype)
        lse_dtype = jnp.float64 if dtype == jnp.float64 else jnp.float32
        return Inputs(
            q=jnp.asarray(draw((self.B, self.T, self.N, self.H)), dtype),
            k=jnp.asarray(draw((self.B, self.S, self.K, self.H)), dtype),
            v=jnp.asarray(draw((self.B, self.S, self.K, self.v_head_dim)), dtype),
            do=jnp.asarray(draw((self.B, self.T, self.N, self.v_head_dim)), dtype),
            dlse=jnp.asarray(draw((self.B, self.N, self.T)), lse_dtype),
        )


_LENGTHS = [1, 2, 5, 17, 127, 128, 129]
_PAIRS = [(113, 203), (203, 113), (239, 1), (1, 239)]

CASES = (
    *(Case(f"length_{n}", T=n, S=n) for n in _LENGTHS),
    *(Case(f"length_{n}_causal", T=n, S=n, causal=True) for n in _LENGTHS),
    *(Case(f"lengths_{t}x{s}", T=t, S=s) for t, s in _PAIRS),
    *(Case(f"lengths_{t}x{s}_causal", T=t, S=s, causal=True) for t, s in _PAIRS),
    *(Case(f"bottom_right_{t}x{s}", T=t, S=s, causal=True, q_offset=s - t) for t, s in _PAIRS),
    Case("bfloat16", T=129, S=160, dtype="bfloat16"),
    Case("bfloat16_causal", T=160, S=160, dtype="bfloat16", causal=True),
    Case("bfloat16_gqa_causal", T=129, S=129, N=4, K=2, dtype="bfloat16", causal=True),
    Case("float16", T=129, S=160, dtype="float16"),
    Case("float16_causal", T=160, S=160, dtype="float16", causal=True),
    Case("batch", T=40, S=56, B=3),
    Case("gqa", T=70, S=90, B=2, N=6, K=2),
    Case("gqa_causal", T=90, S=90, B=2, N=6, K=2, causal=True),
    Case("mqa", T=70, S=90, N=4, K=1),
    Case("mqa_causal", T=70, S=70, N=4, K=1, causal=True),
    Case("head_dim_1", T=33, S=33, H=1, causal=True),
    Case("head_dim_40", T=33, S=47, H=40, dtype="bfloat16"),
    Case("head_dim_128", T=64, S=64, H=128, dtype="bfloat16", causal=True),
    Case("head_dim_256", T=64, S=64, H=256, dtype="bfloat16"),
    Case("narrow_values", T=64, S=80, H=64, Hv=32),
    Case("wide_values_causal", T=80, S=64, H=32, Hv=96, N=4, causal=True),
    Case("offset_positive", T=50, S=200, causal=True, q_offset=77),
    Case("offset_past_the_end", T=50, S=60, causal=True, q_offset=500),
    Case("offset_negative", T=150, S=60, causal=True, q_offset=-70),
    Case("offset_hides_all", T=50, S=60, causal=True, q_offset=-50),
    Case("offset_array", T=140, S=150, B=3, causal=True, q_offset=(-20, 0, 145)),
    Case("offset_array_gqa", T=33, S=150, B=2, N=4, causal=True, q_offset=(100, -33)),
    Case(
        "offset_array_bfloat16", T=33, S=150, B=2, causal=True, q_offset=(10, 117), dtype="bfloat16"
    ),
    Case("scale_large", T=64, S=64, scale=1.0),
    Case("scale_negative", T=64, S=64, scale=-0.25, causal=True),
    Case("scale_zero", T=20, S=150, scale=0.0),
    Case("deterministic", T=129, S=129, N=4, dtype="bfloat16", causal=True, deterministic=True),
)


def named(*names: str) -> tuple[Case, ...]:
    """The cases of these names."""
    table = {case.name: case for case in CASES}
    return tuple(table[name] for name in names)
