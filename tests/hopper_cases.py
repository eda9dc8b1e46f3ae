"""Problems for the Hopper kernels: small ones for the interpreter, all of them for the GPU."""

from __future__ import annotations

import dataclasses

from flash_pallas.backends.hopper.forward.tiles import TUNED_LONG

from .cases import ADDITIVE, LARGE, Case, additive_cases


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
    _case("d128_whole_key_blocks", T=200, S=256, N=2, K=1, H=128),
    _case("d128_causal", T=256, S=256, N=1, K=1, B=3, H=128, causal=True),
    _case("d128_groups", T=130, S=200, N=4, K=1, H=128, causal=True, q_offset=30),
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
    _case("d192", T=136, S=200, N=2, K=1, H=192),
    _case("d192_narrow_values", T=200, S=264, N=2, K=1, H=192, Hv=128, causal=True, q_offset=64),
    _case("d200_causal", T=100, S=300, N=1, K=1, H=200, Hv=256, causal=True, q_offset=150),
    _case("d256", T=72, S=136, N=2, K=1, H=256),
    _case("d256_whole_key_blocks", T=130, S=256, N=1, K=1, B=2, H=256),
    _case("d256_causal", T=256, S=256, N=1, K=1, H=256, causal=True),
    _case("d256_split", T=72, S=136, N=2, K=1, H=256, deterministic=True),
    _case("d80_padded_narrow_values", T=70, S=130, N=1, K=1, H=80, Hv=40, causal=True),
    _case("one_query", T=1, S=150, N=2, K=1, H=128, causal=True, q_offset=149),
    _case("one_key", T=130, S=1, N=1, K=1),
)


def _small(name: str, **fields) -> Case:
    """Returns a case of a modifier: 100 queries and 136 keys, so the last tiles are partial."""
    return _case(name, **({"T": 100, "S": 136, "N": 2, "K": 1} | fields))


_SQUARE = {"T": 130, "S": 130}

# At least one per feature; each runs forward, backward and whatever other gradients it has.
MODIFIERS = (
    _small("window", window=(40, 10)),
    _small("window_causal_128", window=(50, 0), causal=True, H=128, **_SQUARE),
    _small("window_split", window=(30, 20), deterministic=True, q_offset=20),
    _small("window_256", window=(70, 0), H=256, N=1, T=72),
    _small("window_past_all_keys", window=(3, 0), q_offset=100, N=1),
    _small("window_offset_array", window=(30, 8), q_offset=(-30, 90), B=2, N=1),
    _small("positions_causal", causal=True, q_positions="random", kv_positions="gaps", N=1),
    _small("positions_window_128", window=(40, 10), q_positions="gaps", kv_positions="gaps", H=128,
           N=1),
    _small("positions_of_queries", causal=True, window=(60, 0), q_positions="shifted", B=2, N=1,
           kv_lengths=(136, 31), poison=True),
    _small("positions_split", causal=True, q_positions="restart", kv_positions="restart", N=1,
           segments="packed", deterministic=True, **_SQUARE),
    _small("positions_mods", score_mod="relative", mask_mod="stripes", q_positions="shifted",
           kv_positions="gaps", dropout_rate=0.2, alibi="N", N=1),
    _small("window_array_256", window_arrays=((30, 90), (8, 0)), q_offset=20, B=2, N=1, H=256,
           T=72),
    _small("packed_causal", segments="packed", causal=True, **_SQUARE),
    _small("packed_128", segments="packed", H=128, N=1, **_SQUARE),
    _small("packed_split", segments="packed", causal=True, deterministic=True, N=1, **_SQUARE),
    _small("unsorted", segments="unsorted", N=1, **_SQUARE),
    _small("padded", segments="padded", poison=True, **_SQUARE),
    _small("padded_256", segments="padded", poison=True, H=256, N=1, T=70, S=70),
    _small("document_128", segments="long", causal=True, poison=True, H=128, N=1, T=512, S=512),
    _small("document_window_128", segments="long", window=(300, 0), poison=True, H=128, K=1, T=512,
           S=512),
    _small("long_window_128", window=(260, 0), H=128, N=1, T=400, S=400),
    _small("kv_lengths", kv_lengths=(100, 31), B=2, poison=True, N=1),
    _small("kv_lengths_zero_128", kv_lengths=(0, 130), B=2, N=1, H=128, poison=True),
    _small("q_lengths", q_lengths=(70,), poison=True),
    _small("lengths_causal_split", q_lengths=(60,), kv_lengths=(48,), causal=True, poison=True,
           deterministic=True),
    _small("bias_1NTS", bias="1NTS", B=2),
    _small("bias_shared_32", bias="1NTS", B=2, H=32, T=150),
    _small("bias_shared_16", bias="11TS", B=4, K=2, H=16, sinks=True),
    _small("bias_BNTS_128", bias="BNTS", H=128, N=1),
    _small("bias_B1TS_causal", bias="B1TS", causal=True, N=2, **_SQUARE),
    _small("bias_1N1S", bias="1N1S", B=2, N=1),
    _small("bias_B1T1", bias="B1T1", N=2),
    _small("bias_1111", bias="1111", N=1),
    _small("bias_256", bias="11TS", H=256, N=1, T=70, S=70),
    _small("bias_split", bias="1NTS", deterministic=True, N=1),
    _small("bias_padded", bias="B1TS", segments="padded", poison=True, N=1, **_SQUARE),
    _small("bias_infinite_softcap", bias="1NTS-causal", softcap=3.0, N=1, **_SQUARE),
    _small("bias_infinite_score_mod", bias="1NTS-rows", score_mod="falling", N=1),
    _small("bias_infinite_both_128", bias="11TS-inf", softcap=3.0, score_mod="square", H=128, N=1),
    _small("bias_infinite_keys", bias="B11S-inf", softcap=30.0, score_mod="relative", N=1, B=2,
           sinks=True),
    _small("bias_infinite_split", bias="BNTS-causal", softcap=3.0, score_mod="per_entry", N=1,
           deterministic=True, **_SQUARE),
    _small("bias_infinite_choice", bias="1NTS-inf", score_mod="hiding", N=1),
    _small("bias_infinite_256", bias="11TS-causal", softcap=3.0, score_mod="square", H=256, N=1,
           T=70, S=70),
    _small("mask_B1TS", mask="B1TS"),
    _small("mask_BNTS_128", mask="BNTS", H=128, N=1),
    _small("mask_B11S_causal", mask="B11S", causal=True, **_SQUARE),
    _small("mask_11T1_split", mask="11T1", deterministic=True, N=1),
    _small("mask_bias", mask="B1TS", bias="1NTS", N=1),
    _small("softcap", softcap=2.0, scale=0.5),
    _small("softcap_causal_128", softcap=5.0, causal=True, H=128, N=1, **_SQUARE),
    _small("softcap_256", softcap=3.0, H=256, N=1, T=70, S=70),
    _small("softcap_split_bias", softcap=3.0, bias="1N1S", deterministic=True, N=1),
    _small("softcap_saturated", softcap=50.0, scale=20.0, causal=True, sinks=True, N=1, **_SQUARE),
    _small("softcap_wide", softcap=60.0, scale=2.0, causal=True, N=1, **_SQUARE),
    _small("softcap_small_128", softcap=30.0, causal=True, H=128, N=1, T=400, S=400),
    _small("softcap_straddles", softcap=20.0, scale=0.26, T=200, S=400),
    _small("softcap_scale_zero", softcap=3.0, scale=0.0, N=1),
    _small("softcap_one_key", softcap=20.0, causal=True, window=0, q_offset=9, T=136, S=150),
    _small("softcap_one_key_dropout", softcap=20.0, window=(0, 0), dropout_rate=0.3, sinks=True,
           N=1, **_SQUARE),
    _small("softcap_float16", softcap=3.0, dtype="float16", N=1),
    _small("softcap_dropout", softcap=5.0, dropout_rate=0.3, causal=True, N=1, **_SQUARE),
    _small("alibi", alibi="N"),
    _small("alibi_causal_128", alibi="BN", causal=True, H=128, q_offset=13, B=2, N=1),
    _small("alibi_256", alibi="N", T=130, S=70, N=1, H=256),
    _small("alibi_split", alibi="N", deterministic=True, q_offset=-15),
    _small("sinks", sinks=True),
    _small("sinks_hidden_rows_128", sinks=True, causal=True, q_offset=-30, H=128, N=1),
    _small("sinks_256", sinks=True, H=256, N=1, T=70, S=70),
    _small("dropout", dropout_rate=0.3, B=2),
    _small("dropout_causal_128", dropout_rate=0.1, causal=True, H=128, dropout_seed=7, **_SQUARE),
    _small("dropout_split", dropout_rate=0.25, deterministic=True, q_offset=40, causal=True, N=1),
    _small("dropout_256", dropout_rate=0.2, H=256, N=1, T=70, S=70),
    _small("dropout_broadcast", dropout_rate=0.5, broadcast_dropout=True, B=2, N=1),
    _small("score_mod_relative", score_mod="relative"),
    _small("score_mod_square_128", score_mod="square", H=128, causal=True, N=1, **_SQUARE),
    _small("score_mod_per_entry_split", score_mod="per_entry", deterministic=True, N=1, q_offset=9),
    _small("mask_mod_stripes", mask_mod="stripes"),
    _small("mask_mod_prefix_128", mask_mod="prefix", H=128, N=1, B=2, dtype="float16"),
    _small("blocks_window_128", block_mask="window and global", H=128, N=1, T=300, S=300),
    _small("blocks_window_split", block_mask="window and global", deterministic=True, N=1, T=300,
           S=260, alibi="N"),
    _small("blocks_prefix", block_mask="prefix", B=2, H=128, T=200, S=200, softcap=4.0),
    _small("blocks_documents_128", block_mask="documents", H=128, N=2, T=300, S=300, B=2),
    _small("blocks_documents_split", block_mask="documents", N=1, T=200, S=200, B=2,
           deterministic=True),
    _small("blocks_dense_256", block_mask="dense", H=256, N=1, T=200, S=260, sinks=True),
    _small("blocks_listed", block_mask="listed", T=300, S=300, B=2, kv_lengths=(300, 140),
           poison=True),
    _small("blocks_listed_causal_128", block_mask="listed by heads", H=128, causal=True, N=4, K=2,
           T=260, S=300, q_offset=40, dropout_rate=0.2),
    _small("blocks_listed_split", block_mask="listed by KV heads", N=4, K=2, T=260, S=260,
           segments="padded", poison=True, deterministic=True),
    _small("blocks_listed_64", block_mask="small blocks by heads", N=4, K=2, T=200, S=180,
           bias="1NTS"),
    _small("blocks_pairs_64", block_mask="small blocks by heads", N=4, K=2, T=300, S=260, B=2),
    _small("blocks_pairs_of_one_list_128", block_mask="small blocks", H=128, N=2, T=260, S=200,
           softcap=4.0, sinks=True),
    _small("blocks_tall_128", block_mask="tall blocks of a mask_mod", H=128, N=2, T=400, S=300),
    _small("blocks_tall", block_mask="tall blocks", T=300, S=180, B=2, window=(120, 60),
           empty_rows="mean", mask_mod="stripes"),
    _small("max_logit", max_logit=True, causal=True, q_offset=-30, N=1),
    _small("max_logit_256", max_logit=True, H=256, N=1, T=70, S=70),
    _small("d192_128", H=192, Hv=128, causal=True, N=1, **_SQUARE),
    _small("d80_causal", H=80, causal=True, N=1, T=70, S=70),
    _small("d96_causal", H=96, causal=True, N=1, **_SQUARE),
    _small("d96_group", H=96, T=200, S=256),
    _small("d96_window_group", H=96, window=(70, 0), causal=True, T=200, S=200),
    _small("d96_softcap_dropout", H=96, softcap=5.0, dropout_rate=0.2, causal=True, N=1),
    _small("d96_score_mod", H=96, score_mod="relative", N=1),
    _small("d96_bias", H=96, bias="1NTS", N=1),
    _small("d96_blocks", H=96, block_mask="window and global", N=1, T=300, S=300),
    _small("d88_padded", H=88, segments="padded", poison=True, N=1, **_SQUARE),
    _small("d80_64_group", H=80, Hv=64, T=70, S=128),
    _small("d24_padded", H=24, segments="padded", poison=True, N=1, **_SQUARE),
    _small("d80_96_split", H=80, Hv=96, deterministic=True, N=1, T=70),
    _small("d40_16_split", H=40, Hv=16, deterministic=True, bias="1N1S", alibi="N", N=1, T=70),
    _small("d72_causal", H=72, causal=True, N=1, T=70, S=70),
    _small("d64_32", H=64, Hv=32, N=1, T=70),
    _small("d16_bias", H=16, bias="1NTS", B=2, N=1),
    _small("everything", causal=True, window=(90, 0), bias="1NTS", mask="B11S", softcap=4.0,
           alibi="N", sinks=True, dropout_rate=0.2, segments="padded", kv_lengths=(110,),
           q_lengths=(120,), score_mod="relative", mask_mod="stripes", max_logit=True,
           poison=True, **_SQUARE),
    _small("everything_128", window=(90, 70), bias="B1TS", mask="1NTS", softcap=4.0, alibi="BN",
           sinks=True, dropout_rate=0.2, segments="unsorted", kv_lengths=(110, 60), B=2, N=1,
           score_mod="per_entry", mask_mod="prefix", q_offset=(3, -8), H=128),
)  # fmt: skip


def _wide(name: str, **fields) -> Case:
    """Returns a case of wide heads, of 512 columns unless told."""
    return _small(name, **({"H": 512} | fields))


# Head dims above 256, which have kernels of their own: every feature, whole and partial chunks.
WIDE = (
    _wide("wide_512"),
    _wide("wide_512_causal", causal=True, N=4, K=2, **_SQUARE),
    _wide("wide_512_mqa_several_tiles", causal=True, N=2, K=1, T=200, S=300, q_offset=100),
    _wide("wide_320_causal", H=320, causal=True, q_offset=36),
    _wide("wide_384_float16", H=384, dtype="float16", N=1),
    _wide("wide_384_float16_causal", H=384, dtype="float16", causal=True, B=2, **_SQUARE),
    _wide("wide_288_272", H=288, Hv=272, causal=True, N=1, **_SQUARE),
    _wide("wide_512_64", Hv=64, N=1, T=70),
    _wide("wide_64_512", H=64, Hv=512, causal=True, N=1, T=70, S=70),
    _wide("wide_512_one_query", T=1, S=150, causal=True, q_offset=149),
    _wide("wide_512_one_key", T=70, S=1, N=1),
    _wide("wide_512_hidden_rows", causal=True, q_offset=-30, sinks=True, N=1),
    _wide("wide_512_window", window=(40, 10), T=200, S=300, N=1),
    _wide("wide_448_window_causal", H=448, window=(50, 0), causal=True, **_SQUARE),
    _wide("wide_512_window_array", window_arrays=((30, 90), (8, 0)), q_offset=20, B=2, N=1, T=72),
    _wide("wide_512_offset_array", causal=True, q_offset=(33, -40), B=2, N=1, T=70, S=90),
    _wide("wide_512_positions", causal=True, q_positions="random", kv_positions="gaps", N=1, T=70),
    _wide("wide_512_packed", segments="packed", causal=True, N=1, T=200, S=200),
    _wide("wide_512_padded", segments="padded", poison=True, N=1, T=70, S=70),
    _wide("wide_512_lengths", q_lengths=(60, 100), kv_lengths=(100, 31), B=2, poison=True, N=1),
    _wide("wide_512_bias", bias="BNTS", N=2, T=70),
    _wide("wide_384_bias_of_keys", H=384, bias="1N1S", B=2, N=1, T=70),
    _wide("wide_512_bias_of_queries", bias="B1T1", N=2, T=70),
    _wide("wide_512_bias_of_keys", bias="B11S", N=2, T=70, S=200),
    _wide("wide_512_bias_shared_mask", bias="1NTS", mask="B1TS", B=2, N=1, T=70, S=70),
    _wide("wide_512_softcap_dropout", softcap=3.0, dropout_rate=0.2, causal=True, N=1, **_SQUARE),
    _wide("wide_320_bias_infinite", H=320, bias="1NTS-causal", softcap=3.0, score_mod="per_entry",
           N=1, T=70, S=70),
    _wide("wide_512_alibi", alibi="BN", q_offset=13, B=2, N=1, T=70),
    _wide("wide_512_dropout", dropout_rate=0.3, T=70, S=200, N=1),
    _wide("wide_512_score_mod", score_mod="per_entry", mask_mod="stripes", N=1, T=70),
    _wide("wide_512_max_logit", max_logit=True, causal=True, q_offset=-30, N=1, T=70),
    _wide("wide_512_blocks", block_mask="listed by heads", N=2, K=1, T=300, S=300),
    _wide("wide_320_blocks_of_keys", H=320, block_mask=("indices", "BK", (128, 128)), N=2, K=1,
           T=300, S=520),
    _wide("wide_512_everything", causal=True, window=(90, 0), bias="1NTS", mask="B11S",
           softcap=4.0, alibi="N", sinks=True, dropout_rate=0.2, segments="padded",
           kv_lengths=(110,), q_lengths=(120,), score_mod="relative", mask_mod="stripes",
           max_logit=True, poison=True, N=1, **_SQUARE),
    _wide("wide_512_rising", maxima="rising", S=392, N=1, T=70),
    _wide("wide_384_jump", H=384, maxima="jump", S=392, N=1, T=70),
    _wide("wide_512_scores_of_2^30", magnitude=15, causal=True, N=2, T=70, S=150),
)  # fmt: skip


# Maxima that a forward guesses wrong: in every step, in one, in some rows, and in rows that see no
# key of the first block.
MAXIMA = (
    _small("rising", maxima="rising", S=392, N=1),
    _small("rising_causal", maxima="rising", T=300, S=300, N=1, causal=True),
    _small("rising_hidden_rows_128", maxima="rising", T=100, S=300, N=1, H=128, causal=True,
           q_offset=-60, sinks=True),
    _small("rising_float16_128", maxima="rising", S=392, N=1, H=128, dtype="float16"),
    _small("rising_bias_mask", maxima="rising", S=392, N=1, bias="1NTS", mask="B1TS"),
    _small("jump_128", maxima="jump", S=392, N=1, H=128),
    _small("jump_window", maxima="jump", T=300, S=400, N=1, window=(220, 0), q_offset=100),
    _small("apart_256", maxima="apart", S=392, N=1, H=256),
    _small("wide_causal_float16", maxima="wide", T=300, S=300, N=1, causal=True, dtype="float16"),
    _small("rising_softcap_float16", maxima="rising", softcap=200.0, S=392, N=1, dtype="float16"),
    _small("wide_softcap_dropout", maxima="wide", softcap=100.0, dropout_rate=0.3, T=300, S=300,
           N=1, causal=True),
)  # fmt: skip

# With what the forward chooses at lengths that are too much for the interpreter.
LONG_BLOCKS, LONG_BLOCKS_96 = (dataclasses.asdict(TUNED_LONG[n, n]) for n in (128, 96))
FORWARD_BLOCKS = (
    (_small("long_rising_float16_128", maxima="rising", S=260, N=1, H=128, dtype="float16"),
     LONG_BLOCKS),
    (_small("long_jump_causal_128", maxima="jump", T=400, S=400, N=1, H=128, causal=True),
     LONG_BLOCKS),
    (_small("long_ragged_128", T=200, S=231, N=2, H=128), LONG_BLOCKS),
    (_small("long_ragged_96", T=200, S=231, N=2, H=96), LONG_BLOCKS_96),
    (_small("long_jump_causal_96", maxima="jump", T=400, S=400, N=1, H=96, causal=True),
     LONG_BLOCKS_96),
    (_small("long_packed_128", segments="padded", poison=True, T=300, S=300, N=1, H=128,
            causal=True), LONG_BLOCKS),
    (_small("one_warpgroup_128", T=130, H=128, N=1, causal=True), {"warpgroups": 1}),
    (_small("packed_rows", T=40, S=104, B=2, kv_lengths=(100, 31), q_lengths=(40, 9), sinks=True,
            causal=True, q_offset=-5, poison=True), {"packed": True}),
)  # fmt: skip


# Where no warpgroup only loads. Tiles of one block and of as many as there are slots, of which the
# next tile's are known late or early; tiles that are claimed, and whose padding is cleared; the
# fused backward with warpgroups in ping-pong and in lockstep, dK/dV, dQ, and sums of dS.
WITHOUT_PRODUCER = (
    _case("one_block", T=500, S=100, N=2, K=1),
    _case("whole_tiles_128", T=200, S=256, N=2, K=1, H=128),
    _case("tall_blocks_64", T=400, S=200, N=2, K=1, block_mask="tall blocks"),
    _case("tall_blocks_128", T=400, S=200, N=1, K=1, H=128, block_mask="tall blocks"),
    _case("several_blocks_causal_128", T=260, S=260, N=2, K=1, H=128, causal=True),
    _case("several_blocks_96", T=260, S=256, N=2, K=1, H=96),
    _case("short_256", T=136, S=72, N=1, K=1, H=256, causal=True, q_offset=-40),
    _small("documents_128", segments="long", causal=True, poison=True, H=128, N=1, T=512, S=512),
    _small("lengths", kv_lengths=(100, 31), q_lengths=(70, 100), B=2, poison=True, N=1),
    _small("split_128", deterministic=True, H=128, T=200, S=140),
    _small("bias_of_tiles_causal", bias="B1TS", causal=True, N=2, **_SQUARE),
)


def _several_tiles(name: str, **fields) -> Case:
    return _case(name, **({"T": 200, "S": 256, "N": 2, "K": 1} | fields))


# With what the paired backward can be asked to do.
PAIRED_BLOCKS = (
    (_several_tiles("paired_dropout", H=192, dropout_rate=0.2), {}),
    (_several_tiles("paired_staggered", H=192, window=(90, 0)), {"stagger": True}),
    (_several_tiles("paired_slots", H=160, Hv=72, causal=True), {"stages": 3, "do_stages": 1}),
)

# With what the fused backward can be asked to do, but is nowhere by itself.
_DEFERRED = {"block_q": 128, "stages": 2, "do_stages": 2, "defer": True}
FUSED_BLOCKS = (
    (_several_tiles("split_q_128", H=128, causal=True), {"split_q": 3}),
    (_several_tiles("split_q_96", H=96, causal=True), {"split_q": 3}),
    (_several_tiles("meeting_96", H=96, causal=True), {"ping_pong": False}),
    (_several_tiles("signs", K=2, causal=True, dropout_rate=0.3, sinks=True), {"signs": True}),
    (_several_tiles("signs_128", H=128, dropout_rate=0.1), {"signs": True}),
    (_several_tiles("deferred", K=2, causal=True, softcap=3.0), _DEFERRED),
    (_several_tiles("deferred_padded", segments="padded", poison=True, softcap=5.0), _DEFERRED),
    (_several_tiles("deferred_128", H=128, softcap=2.0, scale=0.5, causal=True), {"defer": True}),
    (
        _several_tiles("sums_of_fours_16", N=2, K=2, B=4, H=16, T=130, bias="11TS"),
        {"bias_cluster": 4},
    ),
    (
        _several_tiles("sums_staggered_64", N=1, B=4, T=130, S=300, bias="11TS"),
        {"ping_pong": False},
    ),
    # Of the second key block's one tile, one of two parts has nothing.
    (_several_tiles("split_q_without_tiles", K=2, causal=True), {"split_q": 2}),
)
SECTIONS = _small("sections", T=104, S=104, N=3, K=3, B=3, H=32, causal=True)

# Of lists that are rotated, as those of long sequences are.
ROTATED = tuple(
    case
    for case in MODIFIERS
    if case.name in ("blocks_prefix", "blocks_listed", "blocks_listed_split", "blocks_dense_256")
)

# Three tiles of keys for pairs of CTAs, and more members than a ring has slots.
PAIRS = (
    _small("pairs", bias="1NTS", S=300, B=3, N=1),
    _small("pairs_causal_32", bias="11TS", T=290, S=290, B=2, N=2, K=1, H=32, causal=True),
)


def _float32(name: str, **fields) -> Case:
    return _small(name, **({"dtype": "float32"} | fields))


# As products of bfloat16 parts; each of the kernels, and everything that modifies scores.
FLOAT32 = (
    _float32("float32", N=1, **_SQUARE),
    _float32("float32_causal_128", T=136, S=100, causal=True, q_offset=-30, H=128),
    _float32("float32_32_window_dropout", H=32, window=(40, 10), dropout_rate=0.3, N=1),
    _float32("float32_96_padded", H=96, segments="padded", poison=True, causal=True, **_SQUARE),
    _float32("float32_64_32", H=64, Hv=32, N=1, T=70),
    _float32("float32_bias", bias="1NTS"),
    _float32("float32_bias_infinite", bias="1NTS-rows", softcap=3.0, score_mod="square", N=1, T=70),
    _float32("float32_bias_columns_128", bias="1N1S", N=1, H=128),
    _float32("float32_everything", causal=True, window=(90, 0), bias="1NTS", mask="B11S",
             softcap=4.0, alibi="N", sinks=True, dropout_rate=0.2, segments="padded",
             kv_lengths=(110,), q_lengths=(120,), score_mod="relative", mask_mod="stripes",
             max_logit=True, poison=True, **_SQUARE),
    _float32("float32_everything_128", window=(90, 70), bias="B1TS", mask="1NTS", softcap=4.0,
             alibi="BN", sinks=True, dropout_rate=0.2, segments="unsorted", kv_lengths=(110, 60),
             B=2, N=1, score_mod="per_entry", mask_mod="prefix", q_offset=(3, -8), H=128),
)  # fmt: skip


def _for_each_kernel(name: str, **fields):
    for head_dim in (64, 128, 256):
        for causal in (False, True):
            for deterministic in (False, True):
                tags = "".join(("_causal" * causal, "_split" * deterministic))
                yield _case(f"{name}_d{head_dim}{tags}", H=head_dim, causal=causal,
                            deterministic=deterministic, **fields)  # fmt: skip


ON_DEVICE = (
    *INTERPRETED,
    *MODIFIERS,
    *FLOAT32,
    *MAXIMA,
    *WIDE,
    *_for_each_kernel("square", T=512, S=512, B=2, N=4, K=2),
    *_for_each_kernel("ragged", T=300, S=457, B=2, N=2, K=1),
    *_for_each_kernel("float16", T=640, S=640, N=2, K=2, dtype="float16"),
    _case("long", T=4096, S=4096, N=1, K=1, H=128, causal=True),
    _case("long_full", T=4096, S=4100, N=2, K=1, H=128),
    _case("long_rising", T=4160, S=4160, N=1, K=1, H=128, maxima="rising"),
    # Of an SM's worth of tiles and more; what is smaller has tiles of its own.
    _case("many_tiles", T=700, S=700, B=4, N=8, K=2, H=128),
    _case("many_tiles_d64", T=700, S=700, B=4, N=8, K=2, causal=True),
    # More tiles than SMs: two teams in a CTA of the forward.
    _case("long_blocks_64", T=1200, S=1100, N=4, K=2, B=2, block_mask="small blocks by heads"),
    _case("long_blocks_128", T=1200, S=1100, N=4, K=2, B=2, H=128, block_mask="small blocks"),
    _case("few_queries", T=16, S=4000, N=8, K=2, H=128, causal=True, q_offset=3984),
    _case("few_queries_in_tiles", T=150, S=3000, B=2, N=4, K=2, causal=True, q_offset=2850),
    _case("tall", T=1999, S=130, H=128, causal=True, q_offset=-300),
    _case("wide", T=65, S=3001, H=64, causal=True, q_offset=2936),
    _case("many_heads", T=200, S=200, B=4, N=32, K=4, H=64, causal=True),
    _case("long_window", T=3000, S=3000, N=2, K=1, H=128, causal=True, window=(500, 0)),
    _case("long_window_both", T=2000, S=2500, N=2, K=1, window=(200, 300), q_offset=100),
    _case("long_packed", T=3000, S=3000, B=2, N=2, K=1, H=128, causal=True, segments="packed"),
    _case("long_packed_d64", T=3000, S=3000, B=2, N=2, K=1, segments="padded", poison=True),
    _case("many_entries", T=512, S=512, B=67, N=1, K=1, causal=True),  # 34 and 33 at one time
    _case("long_lengths", T=1500, S=1800, B=3, N=2, K=1, H=128, kv_lengths=(1700, 3, 900)),
    _case("long_bias", T=1000, S=1100, B=3, N=2, K=1, bias="1NTS"),
    # Nine tiles of keys, so that the last pair of CTAs has one; 5, 5 and 3 entries in a sum.
    _case("long_bias_pairs", T=1100, S=1100, B=13, N=1, K=1, H=32, bias="1NTS", causal=True),
    _case("long_bias_128", T=600, S=700, B=3, N=4, K=2, H=128, bias="11TS", causal=True),
    _case("long_bias_256", T=300, S=400, B=2, N=2, K=1, H=256, bias="1NTS"),
    _case("long_bias_columns", T=1000, S=1100, B=2, N=4, K=2, bias="111S", kv_lengths=(700, 1100)),
    _case("long_bias_rows", T=1000, S=1100, B=2, N=2, K=1, H=128, bias="B11S", mask="11T1"),
    _case("long_mask", T=1000, S=1100, B=2, N=2, K=1, H=128, mask="B1TS"),
    _case("long_softcap", T=1500, S=1500, N=2, K=1, H=128, causal=True, softcap=3.0, alibi="N"),
    _case("long_dropout", T=1500, S=1500, B=2, N=2, K=1, H=128, causal=True, dropout_rate=0.2),
    _case("long_dropout_d64", T=1000, S=1500, B=2, N=2, K=1, dropout_rate=0.4, sinks=True),
    _case("long_score_mod", T=1000, S=1500, B=2, N=2, K=1, H=128, score_mod="per_entry"),
    _case("long_192_128", T=1500, S=1500, B=2, N=2, K=1, H=192, Hv=128, causal=True),
    _case("long_96", T=1000, S=1500, B=2, N=2, K=1, H=96, causal=True),
    _case("whole_tiles_96", T=1024, S=1024, B=2, N=2, K=1, H=96),
    _case("long_max_logit", T=1000, S=1500, B=2, N=2, K=1, H=256, max_logit=True, causal=True),
    _case("head_dim_8", T=129, S=129, H=8, causal=True),
    _case("head_dim_20", T=129, S=129, H=20, causal=True),
    _case("head_dim_56_24", T=300, S=457, B=2, N=2, K=1, H=56, Hv=24),
    _case("head_dim_80", T=300, S=457, B=2, N=2, K=1, H=80, causal=True),
    _case("head_dim_80_40", T=300, S=457, B=2, N=2, K=1, H=80, Hv=40, bias="1NTS"),
    _case(
        "head_dim_112",
        T=300,
        S=300,
        B=2,
        N=2,
        K=1,
        H=112,
        causal=True,
        segments="padded",
        poison=True,
    ),
    _case("head_dim_160", T=300, S=457, B=2, N=2, K=1, H=160, causal=True),
    _case("head_dim_256_224", T=300, S=457, B=2, N=2, K=1, H=256, Hv=224, causal=True),
    _case("head_dim_192", T=129, S=200, H=192),
    _wide("long_512", T=700, S=900, B=2, N=4),
    _wide("long_512_causal", T=1500, S=1500, N=8, K=2, causal=True),
    _wide("long_384_window", H=384, T=1000, S=1000, causal=True, window=(300, 0)),
    _wide("long_512_packed", T=1000, S=1000, causal=True, segments="packed"),
    _wide("long_512_bias", T=300, S=400, B=2, bias="1NTS"),
    _float32("float32_square", T=512, S=512, B=2, N=4, K=2),
    _float32("float32_square_causal_128", T=512, S=512, B=2, N=4, K=2, H=128, causal=True),
    _float32("float32_long", T=3000, S=3000, H=128, causal=True, window=(500, 0)),
    _float32("float32_long_softcap", T=1500, S=1500, causal=True, softcap=3.0, alibi="N"),
)

_TRIANGLE = {"T": 300, "S": 300, "K": 2, "causal": True}

# CTAs store dQ of the queries at their keys' positions, where pairs are worked on one at a time:
# see backends/hopper/backward/dq_sums.py.
DIAGONAL = (
    _case("diagonal_64", **_TRIANGLE),
    _case("diagonal_128", **_TRIANGLE, B=2, H=128),
    _case("diagonal_96_one_tile", **_TRIANGLE | {"T": 130, "S": 130}, H=96),
    _case("diagonal_32_window", **_TRIANGLE, H=32, window=(140, 0)),
    _case("diagonal_16_float16", **_TRIANGLE, H=16, dtype="float16"),
    _case("diagonal_alibi_dropout", **_TRIANGLE, alibi="BN", dropout_rate=0.2, B=2),
    _case("diagonal_128_score_mod_bias", **_TRIANGLE, H=128, score_mod="relative", bias="1N1S"),
    _case("diagonal_far_sinks", **_TRIANGLE, B=2, sinks=True, magnitude=(0, 15)),
    _case("diagonal_128_far", **_TRIANGLE, B=2, H=128, magnitude=(15, 0)),
    _case("diagonal_192", **_TRIANGLE, H=192),
    _case("diagonal_192_128", **_TRIANGLE, H=192, Hv=128),
    _case("diagonal_256_far_sinks", **_TRIANGLE, B=2, H=256, sinks=True, magnitude=(15, 0)),
    _case("diagonal_160_window_dropout", **_TRIANGLE, H=160, window=(140, 0), dropout_rate=0.2),
)

_LARGE_TRIANGLE = {"T": 1024, "S": 1024, "B": 2, "N": 40, "K": 40, "causal": True}

DIAGONAL_ON_DEVICE = (
    *DIAGONAL,
    *(
        _case(f"large_diagonal_{width}", **_LARGE_TRIANGLE, H=width)
        for width in (16, 32, 64, 96, 128, 192, 256)
    ),
    _case("large_diagonal_64_long", **_LARGE_TRIANGLE | {"T": 2000, "S": 2000, "N": 9, "K": 9}),
    _case(
        "large_diagonal_128_long", **_LARGE_TRIANGLE | {"T": 4000, "S": 4000, "N": 3, "K": 3}, H=128
    ),
    _case(
        "large_diagonal_192_long", **_LARGE_TRIANGLE | {"T": 4000, "S": 4000, "N": 3, "K": 3}, H=192
    ),
    _case("large_diagonal_128_far", **_LARGE_TRIANGLE, H=128, magnitude=(0, 6)),
    _case("large_diagonal_192_far", **_LARGE_TRIANGLE, H=192, magnitude=(0, 6)),
    _case("large_diagonal_dropout", **_LARGE_TRIANGLE, dropout_rate=0.2),
)

# Logits of any size: small ones, and of several tiles of every kernel.
_SIZES = {"values": (-1e4, -1e9, -3e38), "T": 700, "S": 700}
LARGE_ON_DEVICE = (
    *ADDITIVE,
    *LARGE,
    *(
        dataclasses.replace(
            case, name=f"long_{case.name}_{fields['H']}" + "_split" * bool(more), **more
        )
        for fields in ({"H": 64}, {"H": 128}, {"H": 256})
        for more in ({}, {"deterministic": True})
        for case in additive_cases(**_SIZES, **fields)
        if case.dtype == "bfloat16"
    ),
    _case("long_scores_of_2^30", T=1500, S=1500, B=2, N=4, K=2, magnitude=15, causal=True),
    _case("long_scores_of_2^30_128", T=1500, S=1500, B=2, N=4, K=2, H=128, magnitude=15),
)

# Some groups of heads are left to launches of their own; see fused/launches.py.
FAR_ON_DEVICE = (
    *(
        _case(
            f"many_far_entries_{width}_{'causal' if causal else 'full'}",
            **{"T": 300, "S": 300, "B": 4, "N": 64, "K": 32, "H": width, "causal": causal},
            magnitude=(0, 6, 5, 0),
        )
        for width in (64, 128)
        for causal in (False, True)
    ),
    _case(
        "many_far_float16", T=300, S=300, B=4, N=64, K=32, magnitude=(0, 6, 0, 9), dtype="float16"
    ),
    _case("all_far", T=257, S=400, B=4, N=32, K=32, magnitude=15),
    *(
        _case(
            f"many_far_{name}",
            **{"T": 600, "S": 600, "B": 4, "N": 64, "K": 64, "causal": True},
            **fields,
            magnitude=(0, 6, 5, 0),
        )
        for name, fields in (
            ("sinks", {"sinks": True}),
            ("sinks_128", {"sinks": True, "H": 128}),
            ("lengths", {"kv_lengths": (600, 70, 0, 333), "poison": True}),
            ("alibi", {"alibi": "BN"}),
            ("alibi_128", {"alibi": "N", "H": 128}),
            ("dropout", {"dropout_rate": 0.2}),
            ("score_mod", {"score_mod": "relative"}),
            ("score_mod_128", {"score_mod": "relative", "H": 128}),
        )
    ),
    *(
        _case(
            f"many_{name}_pair_bias",
            **{"T": 520, "S": 600, "B": 8, "N": 16, "K": 16, "bias": "1NTS"},
            magnitude=magnitude,
        )
        for name, magnitude in (("near", 0), ("far", (0, 6, 5, 0, 0, 0, 0, 9)))
    ),
)
