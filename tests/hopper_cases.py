"""Problems for the Hopper kernels: small ones for the interpreter, all of them for the GPU."""

from __future__ import annotations

from .cases import Case


def _case(name: str, **fields) -> Case:
    return Case(name, **({"dtype": "bfloat16"} | fields))


# Each runs forward and backward in 2 to 12 seconds under the interpreter. With two CTAs for the
# persistent forward most of them cross from one query tile to the next.
INTERPRETED = (
    _case("d64", T=128, S=128),
    _case("d64_causal", T=256, S=256, N=2, K=1, causal=True),
    _case("d64_ragged", T=100, S=72, N=1, K=1),
    _case("d64_split", T=200, S=136, N=2, K=1, causal=True, deterministic=True),
    _case("d64_float16", T=130, S=70, N=1, K=1, dtype="float16", causal=True),
    _case("d128", T=136, S=200, N=3, K=1, H=128),
    _case("d128_causal", T=256, S=256, N=1, K=1, B=3, H=128, causal=True),
    _case("d128_bottom_right", T=100, S=200, H=128, causal=True, q_offset=100),
    _case("d128_hidden_rows", T=200, S=72, N=1, K=1, H=128, causal=True, q_offset=-150),
    _case("d128_offset_array", T=150, S=140, B=2, H=128, causal=True, q_offset=(5, -20)),
    _case("d128_split", T=136, S=100, N=2, K=1, H=128, deterministic=True),
    _case(
        "d128_split_offset_array",
        T=70,
        S=90,
        N=1,
        K=1,
        B=2,
        H=128,
        causal=True,
        q_offset=(33, -40),
        deterministic=True,
    ),
    _case("d256", T=72, S=136, N=2, K=1, H=256),
    _case("d256_causal", T=128, S=128, N=1, K=1, H=256, causal=True),
    _case("d80_padded_narrow_values", T=70, S=130, N=1, K=1, H=80, Hv=40, causal=True),
    _case("one_query", T=1, S=150, N=2, K=1, H=128, causal=True, q_offset=149),
    _case("one_key", T=130, S=1, N=1, K=1),
)


def _for_each_kernel(name: str, **fields):
    for head_dim in (64, 128, 256):
        for causal in (False, True):
            for deterministic in (False, True):
                if head_dim == 256 and deterministic:
                    continue  # head dim 256 has no other backward
                tags = "".join(("_causal" * causal, "_split" * deterministic))
                yield _case(f"{name}_d{head_dim}{tags}", H=head_dim, causal=causal,
                            deterministic=deterministic, **fields)  # fmt: skip


ON_DEVICE = (
    *INTERPRETED,
    *_for_each_kernel("square", T=512, S=512, B=2, N=4, K=2),
    *_for_each_kernel("ragged", T=300, S=457, B=2, N=2, K=1),
    *_for_each_kernel("float16", T=640, S=640, N=2, K=2, dtype="float16"),
    _case("long", T=4096, S=4096, N=1, K=1, H=128, causal=True),
    _case("tall", T=1999, S=130, H=128, causal=True, q_offset=-300),
    _case("wide", T=65, S=3001, H=64, causal=True, q_offset=2936),
    _case("many_heads", T=200, S=200, B=4, N=32, K=4, H=64, causal=True),
    _case("head_dim_8", T=129, S=129, H=8, causal=True),
    _case("head_dim_192", T=129, S=200, H=192),
)
