"""Problems that cuDNN takes, for a CPU, where jax.nn's own attention stands in, and for a GPU."""

from __future__ import annotations

from .cases import Case


def _case(name: str, **fields) -> Case:
    usual = {"T": 256, "S": 256, "B": 2, "N": 4, "dtype": "bfloat16"}
    return Case(name, **(usual | fields))


_CROSS = {"T": 192, "S": 320}

CASES = (
    _case("plain"),
    _case("causal", causal=True),
    _case("float16", dtype="float16"),
    _case("float16_causal_gqa", dtype="float16", causal=True, K=2),
    _case("cross", **_CROSS),
    _case("cross_causal", causal=True, **_CROSS),
    _case("more_queries", T=320, S=192),
    _case("lengths_66x130", T=66, S=130),
    _case("length_130_causal", T=130, S=130, causal=True),
    _case("offset_without_a_mask", q_offset=7),
    _case("scale", scale=0.3),
    _case("gqa", K=2),
    _case("gqa_causal_128", K=2, H=128, causal=True),
    _case("mqa", K=1),
    *(_case(f"head_dim_{h}", H=h, causal=True) for h in (8, 40, 96, 128)),
    _case("head_dim_128_full", H=128),
    _case("window", window=(63, 0)),
    _case("window_causal", window=(32, 5), causal=True, K=2),
    _case("window_cross_128", window=(100, 0), H=128, **_CROSS),
    _case("window_of_one", window=(0, 0)),
    _case("window_wider_than_all", window=(1000, 0)),
    _case("kv_lengths", kv_lengths=(200, 77), poison=True),
    _case("kv_lengths_zero", kv_lengths=(0, 130), poison=True),
    _case("q_lengths", q_lengths=(256, 33), poison=True),
    _case("lengths_causal", q_lengths=(130, 0), kv_lengths=(120, 256), poison=True, causal=True),
    _case("lengths_gqa_128", q_lengths=(70, 192), kv_lengths=(320, 1), poison=True, K=2, H=128,
          **_CROSS),
    _case("bias", bias="1NTS"),
    _case("bias_of_entries", bias="BNTS", K=2),
    _case("bias_causal", bias="1NTS", causal=True),
    _case("bias_float16", bias="BNTS", dtype="float16", H=128),
    _case("bias_infinite", bias="1NTS-inf", B=1),
    _case("bias_infinite_causal", bias="BNTS-inf", causal=True),
    *(_case(f"mask_{p}", mask=p) for p in ("BNTS", "B1TS", "1NTS", "11TS")),
    _case("mask_causal", mask="BNTS", causal=True, K=2),  # some first queries see no key
    _case("mask_float16", mask="B1TS", dtype="float16", **_CROSS),
)  # fmt: skip

# Wider heads than cuDNN takes on compute capability 10.x.
WIDE = (
    _case("head_dim_256", H=256),
    _case("head_dim_256_causal", H=256, causal=True, K=2),
    _case("head_dim_192_causal", H=192, causal=True),
)
