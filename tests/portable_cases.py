"""Problems for the portable kernels alone: head dims above 256, which two warpgroups share."""

from __future__ import annotations

from .cases import Case


def wide(name: str, **fields):
    """Returns a case of head dims above 256; the last Q and KV tiles are partial."""
    return Case(name, **({"T": 70, "S": 100, "N": 2, "K": 1, "dtype": "bfloat16"} | fields))


# Two warpgroups have half of the columns each. On 8.0 tiles of K and V lie next to each other where
# they fit; on 8.6 they take turns above 448 in the forward, and in the backward at all of these.
WIDE = (
    wide("288_causal", H=288, causal=True),
    wide("512", H=512, N=1),
    wide("320_float16", H=320, window=(20, 10), dtype="float16", softcap=3.0, dropout_rate=0.3),
    wide("512_lengths", H=512, B=2, kv_lengths=(100, 31), poison=True, sinks=True, max_logit=True),
    wide("512_with_64", H=512, Hv=64, B=2, bias="1NTS", causal=True, q_offset=20),
    wide("64_with_512", H=64, Hv=512, alibi="N", segments="packed", T=70, S=70),
    wide("264_with_504", H=264, Hv=504, mask="B1TS", bias="111S", score_mod="per_entry"),
    wide("512_blocks", H=512, block_mask="small blocks by heads", bias="11TS", T=100),
)
