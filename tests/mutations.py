"""Breaks one line at a time, in a copy, and expects the test named beside it to fail.

Not part of the default run, for it takes ten minutes on two cores:

    python -m pytest tests/mutations.py -n 2

tests/README.md shows the list; tests/test_mutations.py keeps both up to date.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent


class Mutation(NamedTuple):
    """One wrong edit.

    Attributes:
        feature: what it breaks.
        file: in flash_pallas/.
        old: text that occurs once in the file.
        new: what replaces it.
        test: relative to tests/; must fail.
    """

    feature: str
    file: str
    old: str
    new: str
    test: str

    def __str__(self):
        return f"{self.feature}: {self.old}"


def _case(name: str) -> str:
    return f"test_forward_backward.py::test_xla_with_many_small_blocks[{name}]"


def _portable(name: str) -> str:
    return f"test_portable_interpreted.py::test_kernels[{name}]"


_RING = "test_parallel_features.py::test_strategies"

MUTATIONS = (
    Mutation("causal", "core/tile.py", "shift + band.right", "shift + band.right + 1",
             _case("window_causal")),
    Mutation("causal", "core/mask.py", "return cls(right=0)", "return cls(right=1)",
             "core/test_mask.py"),
    Mutation("window", "core/tile.py", "shift - band.left", "shift - band.left - 1",
             _case("window")),
    Mutation("window", "core/mask.py", "keep = kv_pos - q_pos >= -self.left",
             "keep = kv_pos - q_pos > -self.left", _case("window")),
    Mutation("window, blocks", "core/mask.py", "ints.floor_div(q_start - self.left, block_kv)",
             "ints.floor_div(q_start - self.left, block_kv) + 1", _case("window")),
    Mutation("window, blocks", "core/mask.py",
             "ints.ceil_div(q_start + (q_rows + self.right), block_kv)",
             "ints.floor_div(q_start + (q_rows + self.right), block_kv)", _case("window")),
    Mutation("q_offset", "core/bounds.py", "position = start[None] + _offsets(",
             "position = start[None] - _offsets(", _case("window_offset_array")),
    Mutation("q_offset", "core/bounds.py", "position = start[None] - _offsets(",
             "position = start[None] + _offsets(", _case("window_offset_array")),
    Mutation("segments", "core/scores.py",
             "tile.per_q(inputs.q_segments) == tile.per_kv(inputs.kv_segments)",
             "tile.per_q(inputs.q_segments) >= tile.per_kv(inputs.kv_segments)", _case("packed")),
    Mutation("segments, blocks", "core/bounds.py", "jnp.where(meets, index, _MOST)",
             "jnp.where(meets, index + 1, _MOST)", _case("packed")),
    Mutation("segments, blocks", "core/bounds.py", "jnp.where(meets, index + 1, 0)",
             "jnp.where(meets, index, 0)", _case("packed")),
    Mutation("segments, blocks", "core/bounds.py", "jnp.where(ids < 0, _MOST, ids)", "ids",
             "core/test_bounds.py"),
    Mutation("segments, whole blocks", "core/bounds.py", "~whole & (index < stop[..., None])",
             "~whole & (index < 0)", "core/test_bounds.py"),
    Mutation("segments, whole blocks", "core/bounds.py", "whole = same & (low == high)",
             "whole = same & (low <= high)", "core/test_bounds.py"),
    Mutation("segments, padding", "core/padding.py", "else segments >= 0", "else segments >= -9",
             _case("padded")),
    Mutation("kv_lengths", "core/tile.py", "cols=tail if self.q_axis == 0 else None", "cols=None",
             _case("kv_lengths")),
    Mutation("kv_lengths, transposed", "core/tile.py", "rows=tail if self.q_axis == 1 else None",
             "rows=None", "core/test_tile.py"),
    Mutation("kv_lengths, blocks", "core/bounds.py", "ints.ceil_div(n, block_kv)",
             "ints.floor_div(n, block_kv)", _case("kv_lengths")),
    Mutation("kv_lengths, blocks", "core/bounds.py", "start[None] >= operands.kv_lengths[:, None]",
             "start[None] + 1 >= operands.kv_lengths[:, None]", "core/test_bounds.py"),
    Mutation("lengths, padding", "core/padding.py", "[None] < lengths[:, None]",
             "[None] <= lengths[:, None]", _case("kv_lengths")),
    Mutation("q_lengths", "core/padding.py", "jnp.where(rows, out.lse_log2, EMPTY_ROW)",
             "out.lse_log2", _case("q_lengths")),
    Mutation("bias", "core/scores.py", "x = x + inputs.bias", "x = x - inputs.bias",
             _case("bias_1NTS")),
    Mutation("bias, gradient in the fused backward", "backends/hopper/fused_finish.py",
             "cta.sums.wait_empty(n)", "pass",
             "test_hopper_interpreted.py::test_kernels[bias_1NTS]"),
    Mutation("bias, order", "core/scores.py", "x, scale = x * scale, 1.0", "x = x",
             _case("bias_1NTS")),
    Mutation("bias, gradient", "backends/xla/tiles.py", "sum(1, keepdims=True) if leading[1] == 1",
             "max(1, keepdims=True) if leading[1] == 1", _case("bias_B1T1")),
    Mutation("bias, shared by part of the batch", "backends/xla/tiles.py",
             "jnp.broadcast_to(cut[:, None], (len(x), repeats, *cut.shape[1:]))",
             "jnp.broadcast_to(cut[None], (repeats, *cut.shape))",
             "test_xla.py::test_a_bias_shared_by_part_of_the_batch"),
    Mutation("mask", "core/scores.py", "keep = inputs.mask if keep is None else",
             "keep = ~inputs.mask if keep is None else", _case("mask_B11S")),
    Mutation("mask, with others", "core/scores.py", "else keep & inputs.mask", "else keep",
             _case("mask_mod_padded_mask")),
    Mutation("softcap", "core/scores.py", "tile.tanh(x * (scale / spec.softcap))",
             "tile.tanh(x * scale)", _case("softcap")),
    Mutation("softcap, gradient", "core/scores.py", "d * (1.0 - tanh * tanh)", "d * (1.0 - tanh)",
             _case("softcap")),
    Mutation("softcap, small logits", "backends/mosaic/inline_cap.py", "SMALL = 0.4375",
             "SMALL = 0.875", "test_hopper_interpreted.py::test_kernels[softcap_straddles]"),
    Mutation("speculation, sums", "backends/hopper/forward_scores.py",
             "l = rows.l * per_row(alpha, sums.shape) + sums", "l = rows.l + sums",
             "test_hopper_interpreted.py::test_kernels[wide_causal_float16]"),
    Mutation("speculation, limit", "backends/hopper/forward_scores.py",
             "2.0**self.plan.speculates", "2.0**126",
             "test_hopper_interpreted.py::test_kernels[rising_float16_128]"),
    Mutation("no producer, next tile", "backends/hopper/forward_feeder.py",
             "number = lax.select(inside, number, ahead.following)", "number = ahead.number",
             "test_hopper_interpreted.py::test_compute_warpgroups_that_load"
             "[several_blocks_causal_128]"),
    Mutation("no producer, short tiles", "backends/hopper/forward_feeder.py",
             "(cta.k, released + 1)", "(cta.k, released)",
             "test_hopper_interpreted.py::test_compute_warpgroups_that_load"
             "[several_blocks_causal_128]"),
    Mutation("parts of a walk", "backends/hopper/query_walk.py",
             "n = n + self.part[0]", "n = n + 0",
             "test_hopper_interpreted.py::test_fused_blocks[parts_128]"),
    Mutation("launches, where sums lie", "backends/hopper/fused_cta.py",
             "batch - first[0]", "batch",
             "test_hopper_interpreted.py::test_fused_blocks[launches_of_entries]"),
    Mutation("launches, sums of a bias", "backends/hopper/fused_bias.py",
             "head - cta.gmem.origin[1] * self.problem.group", "head - cta.gmem.origin[1]",
             "test_hopper_interpreted.py::test_fused_blocks[launches_bias]"),
    Mutation("launches, the first writes", "backends/hopper/fused_cta.py",
             '"add" if self.adds else None', '"add"',
             "test_hopper_interpreted.py::test_fused_blocks[first_alone]"),
    Mutation("alibi_slopes", "core/scores.py", "_spread(tile, -inputs.slope)",
             "_spread(tile, inputs.slope)", _case("alibi")),
    Mutation("alibi_slopes", "core/tile.py", "lax.abs(self.q_pos - self.kv_pos)",
             "self.q_pos - self.kv_pos", _case("alibi")),
    Mutation("alibi_slopes, gradient", "core/scores.py", "return -dz * ", "return dz * ",
             _case("alibi")),
    Mutation("score_mod", "core/mods.py", "i: tile.q_pos", "i: tile.kv_pos",
             _case("score_mod_relative")),
    Mutation("score_mod, order", "core/scores.py", "x = x if scale == 1.0 else x * scale", "x = x",
             _case("score_mod_square")),
    Mutation("score_mod, gradient", "core/scores.py", "return pull(dx)[0], dparams",
             "return dx, dparams", _case("score_mod_softcap_bias")),
    Mutation("mask_mod", "core/mods.py", "j: tile.kv_pos", "j: tile.q_pos",
             _case("mask_mod_prefix")),
    Mutation("mask_mod, with others", "core/scores.py", "else keep & found", "else keep",
             _case("mask_mod_padded_mask")),
    Mutation("sinks", "core/softmax.py", "l * shrink + jnp.exp2(sink_log2 - most)", "l * shrink",
             _case("sinks")),
    Mutation("sinks, gradient", "vjp.py", "-jnp.sum(weight * delta, axis=-1)",
             "jnp.sum(weight * delta, axis=-1)", _case("sinks")),
    Mutation("sinks of -inf", "core/softmax.py",
             "jnp.where(most == -jnp.inf, jnp.zeros_like(most), most)", "most",
             "core/test_softmax.py"),
    Mutation("dropout", "core/scores.py", "inputs.dropout_key, tile.q_pos, tile.kv_pos",
             "inputs.dropout_key, tile.kv_pos, tile.q_pos", _case("dropout")),
    Mutation("dropout, gradient", "backends/xla/tiles.py", "for x in (p, dp))",
             "for x in (p, dp / gain))", _case("dropout")),
    Mutation("dropout, hashed keys", "core/tile.py", "self.per_q(q_keys) * self.per_kv(kv_keys)",
             "self.per_q(q_keys) ^ self.per_kv(kv_keys)", "core/test_scores.py"),
    Mutation("dropout, rate", "core/dropout.py", "return field >= ", "return field > ",
             "core/test_dropout.py"),
    Mutation("dropout, gain", "core/dropout.py", "return LEVELS / (LEVELS - threshold(rate))",
             "return 1.0 / (1.0 - rate) + 1e-5", "core/test_dropout.py"),
    Mutation("dropout, heads", "core/dropout.py", "^ members[None, :]",
             "^ (members * jnp.uint32(0))[None, :]", "core/test_dropout.py"),
    Mutation("dropout, batch", "core/dropout.py", "mix(mix(state) ^ entries)",
             "mix(mix(state) ^ (entries & jnp.uint32(0)))", "core/test_dropout.py"),
    Mutation("dropout, two keys of a hash", "core/dropout.py", "key * _like(key, TWIN)", "key",
             "core/test_dropout.py"),
    Mutation("dropout, mixing", "core/dropout.py", "return _fold(x * _like(x, 0x846CA68B))",
             "return x", "core/test_dropout.py"),
    Mutation("dropout, product", "core/dropout.py", "call_key, q_pos) * column_keys(kv_pos)",
             "call_key, q_pos) ^ column_keys(kv_pos)", "core/test_dropout.py"),
    Mutation("dropout, odd keys", "core/dropout.py", "return key | _like(key, 1)", "return key",
             "core/test_dropout.py"),
    Mutation("max_logit", "vjp.py", "out.max_log2 * softmax.LN2", "out.max_log2",
             _case("max_logit")),
    Mutation("rows without keys", "core/softmax.py", "jnp.full_like(l, EMPTY_ROW)",
             "jnp.zeros_like(l)",
             "test_forward_backward.py::test_rows_without_keys_are_exactly_zero[mask_BNTS]"),
    Mutation("rows without keys", "core/softmax.py", "jnp.where(empty, jnp.zeros_like(l), 1.0 / l)",
             "1.0 / (l * 0.0)",
             "test_forward_backward.py::test_rows_without_keys_are_exactly_zero[kv_lengths_zero]"),
    Mutation("cotangent of the log-sum-exp", "vjp.py", "return delta - jnp.where(lse_log2",
             "return delta + jnp.where(lse_log2", _case("window")),
    Mutation("NaN in hidden biases", "backends/xla/tiles.py",
             "rows if keep is None else keep & rows", "keep", _case("bias_lengths")),
    Mutation("decode, merge", "core/softmax.py", "jnp.sum(o * weights[..., None], axis=0)",
             "jnp.sum(o, axis=0)", "test_decode.py::test_the_oracle"),
    Mutation("decode, sinks", "core/softmax.py", "jnp.sum(weights, axis=0), sink_log2)",
             "jnp.sum(weights, axis=0))", "test_decode.py::test_the_oracle"),
    Mutation("decode, ranges", "backends/xla/decode.py", "jnp.stack([start, start + size]",
             "jnp.stack([start, start + size - 1]", "test_decode.py::test_the_oracle"),
    Mutation("decode, padding", "backends/xla/decode.py", "place[None] < operands.kv_lengths",
             "place[None] <= operands.kv_lengths", "test_decode.py::test_the_oracle"),
    Mutation("decode, pages", "backends/xla/decode.py", "place[::page_size] // page_size",
             "place[::page_size] // page_size + 1", "test_decode.py::test_the_oracle"),
    Mutation("decode, q_offset", "backends/xla/decode.py", "lengths - problem.q_len if offset",
             "lengths - 1 if offset", "test_decode.py::test_the_oracle"),
    Mutation("decode, eight bits", "backends/xla/decode.py", "found * scale.astype(found.dtype)",
             "found", "test_quantised.py::test_a_round_trip"),
    Mutation("decode, vmap", "batching.py", "table + first[:, None]", "table",
             "test_decode_vmap.py::test_vmap"),
    Mutation("decode, keys of a query", "core/mask.py", "jnp.minimum(q_pos + self.right, end)",
             "end", "core/test_mask.py"),
    Mutation("decode, scales of heads", "backends/hopper/decode_columns.py",
             "inverse * v_scale", "inverse",
             "test_hopper_decode.py::test_decode_kernels[int8]"),
    Mutation("decode, weights in float16", "backends/hopper/decode_columns.py",
             "folded.m - self.weight_bits", "folded.m",
             "test_hopper_decode.py::test_decode_kernels[int8]"),
    Mutation("decode, end of V", "backends/hopper/decode_columns.py",
             "clearing.clear_from(v, valid, ", "clearing.clear_from(v, valid + 64, ",
             "test_hopper_decode.py::test_decode_kernels[around_two_blocks]"),
    Mutation("decode, scales of pages", "backends/hopper/decode_pages.py",
             "of[page if of.shape[0] > 1 else 0, cta.head]", "of[0, cta.head]",
             "test_hopper_decode.py::test_decode_kernels[int8_pages_of_16]"),
    Mutation("layers, eight bits", "nn/_cached.py", "x.astype(jnp.float32) * scale",
             "x.astype(jnp.float32)",
             "test_nn_cache.py::test_caches_in_eight_bits_of_numbers_that_they_hold"),
    Mutation("append, room", "cache.py", "exists = (place < room) & (page >= 0)",
             "exists = page >= 0", "test_cache.py::test_appending_to_pages"),
    Mutation("append, eight bits", "cache.py", "jnp.round(x), float", "x, float",
             "test_quantised.py::test_a_round_trip"),
    Mutation("append, rotation", "cache.py", "lengths[:, None] + step, rope_theta",
             "lengths[:, None] + 0 * step, rope_theta",
             "test_cache.py::test_keys_are_rotated_by_their_positions"),
    Mutation("layers, ring", "nn/_cached.py", "jnp.mod(positions(cache, count), room)",
             "positions(cache, count)", "test_nn_cache.py::test_token_by_token_is_one_forward"),
    Mutation("layers, ring not full", "nn/_cached.py", "jnp.where(place < 0, -1, 0)",
             "jnp.where(place < 0, 0, 0)", "test_nn_cache.py::test_token_by_token_is_one_forward"),
    Mutation("append, bad pages", "cache.py", "exists = (place < room) & (page >= 0)",
             "exists = place < room", "test_cache.py::test_appending_to_pages"),
    Mutation("tuning, exact calls", "tables.py", "{**_stated(problem), **_stated(problem.spec)}",
             "{**_stated(problem)}",
             "test_tuning.py::test_nothing_but_the_very_call_is_caught"),
    Mutation("tuning, the caller first", "dispatch.py",
             "{**(tuned.blocks if tuned else {}), **override}",
             "{**override, **(tuned.blocks if tuned else {})}",
             "test_tuning.py::test_the_caller_overrules_the_cache_of_the_kernel_that_he_names"),
    Mutation("tuning, noise", "tuning.py", "if ratios[best] >= LEAST_GAIN else", "if best else",
             "test_tuning.py::test_a_gain_within_the_noise_changes_nothing"),
    Mutation("shards, shared operands", "sharding.py",
             "return lax.psum(exact, shared)",
             "return (exact)",
             "test_sharding.py::test_a_bias_shared_by_parts_of_the_batch"),
    Mutation("shards, entries that one reads", "sharding.py",
             "lax.axis_index(names) * mine",
             "0 * mine",
             "test_sharding.py::test_a_bias_shared_by_parts_of_the_batch"),
    Mutation("shards, dropout", "sharding.py",
             "numbers[0] * batch, numbers[1] * heads",
             "0 * batch, 0 * heads",
             "test_sharding.py::test_dropout_and_mods_inside_shard_map_count_in_the_whole"),
    Mutation("ring, merging", "parallel/ring.py",
             "jnp.stack([mine.lse_log2, out.lse_log2])",
             "jnp.stack([out.lse_log2, out.lse_log2])",
             _RING),
    Mutation("ring, gradients come home", "parallel/ring.py",
             "-last if step == last else 1",
             "1",
             _RING),
    Mutation("ring, dropout", "parallel/ring.py",
             "zip((me, me - ahead), cut, strict=True)",
             "zip((me, me), cut, strict=True)",
             "test_parallel.py::test_dropout_drops_what_it_drops_on_one_device"),
    Mutation("ring, dropout on Hopper", "backends/mosaic/side_arrays.py",
             "return pad(operands.q_places), pad(operands.kv_places[:1])",
             "return pad(operands.kv_places), pad(operands.kv_places[:1])",
             "test_parallel_features.py::test_hopper_kernels_drop_by_places_in_the_whole"),
    Mutation("ring, zigzag", "parallel/layout.py",
             "late = (2 * shards - 2 - device) * half",
             "late = (2 * shards - 1 - device) * half",
             "test_parallel.py::test_dropout_drops_what_it_drops_on_one_device"),
    Mutation("layers in a ring, positions", "nn/_options.py",
             "at = layer.context_parallel.positions(length)",
             "at = jnp.arange(length)",
             "test_nn_parallel.py"),
    Mutation("ring, plan", "parallel/plan.py",
             "2 * self.shards - 1 - 2 * me + ahead",
             "2 * self.shards - 2 * me + ahead",
             "test_parallel.py::test_the_plan_of_a_ring_computes_every_visible_pair_once"),
    Mutation("portable, copies", "backends/portable/stream.py",
             "self.copies.arrived(self._second(n), pending=1)", "pass",
             "test_portable_interpreted.py::test_deterministic_kernels[mask_bias]"),
    Mutation("portable, copies", "backends/portable/passing.py",
             "self.copies.arrived(*self.of(n, self.slot(n)))", "self.copies.arrived()",
             _portable("mask_B1TS")),
    Mutation("portable, copies", "backends/portable/passing.py",
             "lax.bitwise_and(jnp.int32(n), jnp.int32(self.count - 1))", "jnp.int32(0)",
             "test_portable_interpreted.py::test_other_tiles_of_the_fused_backward"),
    Mutation("portable, copies", "backends/portable/key_stream.py",
             'self.copies.arrived(self._tile("v", n), bit=bit)', "self.copies.arrived(bit=bit)",
             _portable("mask_B1TS")),
    Mutation("portable, copies", "backends/portable/stream.py", "self.slot(n), found.row",
             "self.slot(0), found.row",
             "test_portable_interpreted.py::test_deterministic_kernels[mask_bias]"),
    Mutation("portable, segments", "backends/portable/walk.py",
             "return BlockRange(start, start, start, stop)",
             "return BlockRange(start, start, stop, stop)", _portable("packed_causal")),
    Mutation("portable, window", "backends/portable/walk.py",
             'if problem.spec.mask.left is None and "kv_segments"', 'if "kv_segments"',
             "test_portable_interpreted.py::test_deterministic_kernels[window_causal_128]"),
    Mutation("portable, lengths", "backends/portable/dkv.py",
             "jnp.where(key < lengths[cta.batch], values, jnp.zeros_like(values))", "values",
             "test_portable_interpreted.py::test_deterministic_kernels[kv_lengths]"),
    Mutation("portable, ragged ends", "backends/portable/keys.py", "length if ends else None",
             "None", "test_portable_interpreted.py::test_keys_past_the_end_weigh_nothing"),
    Mutation("portable, sums of dQ", "backends/portable/dq_sums.py",
             "[${vector}+{4 * THREADS * n}]", "[${vector}+{4 * n}]",
             "test_portable_ptx.py::test_sums_of_dq"),
    Mutation("portable, warpgroups", "backends/portable/fused.py",
             "cta.copies.put(ds, weights.at[OF_K], first)", "cta.copies.put(ds, weights.at[OF_K])",
             _portable("window")),
    Mutation("portable, ragged ends", "backends/portable/forward.py",
             "cta.kv_length if ragged else None", "None", _portable("sinks")),
    Mutation("portable, heads", "backends/portable/keys.py", "group + step.member", "group",
             _portable("alibi")),
    Mutation("portable, bias", "backends/mosaic/side_arrays.py",
             "return found, head if shape[1] > 1 else 0", "return found, 0",
             _portable("bias_1NTS")),
    Mutation("portable, dropout", "backends/portable/dkv.py",
             "recompute.gained(self.problem, sums.dv)", "sums.dv",
             "test_portable_interpreted.py::test_deterministic_kernels[softcap_dropout]"),
    Mutation("portable, dropout", "backends/portable/fused.py",
             "if spec.dropout_rate else 1.0", "if False else 1.0", _portable("dropout")),
    Mutation("portable, PTX", "backends/portable/grid.py",
             "block * self.block_rows + row", "label",
             "test_portable_ptx.py::test_products_of_a_grid"),
    Mutation("portable, shared weights", "backends/portable/folding.py",
             "rows.l * alpha + found.sums", "rows.l + found.sums", _portable("apart_256")),
    Mutation("portable, shared weights", "backends/portable/folding.py",
             "shared_rows.put(alpha,", "shared_rows.put(rows.l,", _portable("apart_256")),
    Mutation("portable, PTX", "backends/portable/shared_rows.py",
             "4 * grid.row(label)", "4 * label",
             "test_portable_ptx.py::test_numbers_of_rows_reach_accumulators_of_a_grid"),
    Mutation("portable, PTX", "backends/portable/products.py",
             "(high, odd) if units_first else (odd, high)", "(odd, high)",
             "test_portable_ptx.py::test_products"),
    Mutation("portable, PTX", "backends/portable/tiles.py", "tile_offset=down * 2 * self.pitch",
             "tile_offset=down * self.pitch", "test_portable_ptx.py::test_copies_fill_a_tile"),
    Mutation("portable, PTX", "backends/portable/tiles.py",
             "left = arith.subi(self.limit, index)", "left = self.limit",
             "test_portable_ptx.py::test_copies_fill_a_tile"),
    Mutation("portable, PTX", "backends/portable/inputs.py", "self.last, self.stride",
             "self.stride, self.last", "test_portable_ptx.py::test_a_bias_in_registers"),
    Mutation("portable, gradient of a bias", "backends/mosaic/bias_tiles.py",
             "return self.batch + batch, self.head + head", "return self.batch + batch, self.head",
             _portable("bias_shared_16")),
    Mutation("portable, gradient of a bias", "backends/portable/score_stream.py",
             "self.copies.arrived(*self._of(n)[1])", "self.copies.arrived()",
             _portable("bias_BNTS_128")),
    Mutation("portable, gradient of a bias", "backends/portable/score_lines.py",
             "jnp.where(inside, x, jnp.zeros_like(x))", "x",
             "test_portable_interpreted.py::"
             "test_gradients_of_what_modifies_scores[columns_lengths]"),
    Mutation("portable, gradient of slopes", "backends/portable/score_lines.py",
             "kv_len = cta.gmem.kv_length(self.problem, cta.batch)", "kv_len = None",
             _portable("alibi")),
    Mutation("portable, PTX", "backends/portable/tile_store.py", "i32_constant(width - right)",
             "i32_constant(width)", "test_portable_ptx.py::test_a_sum_is_written"),
)  # fmt: skip


@pytest.fixture
def copy(tmp_path):
    """Package and tests, where they can be broken without harm."""
    for name in ("flash_pallas", "tests"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


@pytest.mark.parametrize("mutation", MUTATIONS, ids=str)
def test_is_noticed(mutation, copy):
    path = copy / "flash_pallas" / mutation.file
    text = path.read_text()
    assert text.count(mutation.old) == 1
    path.write_text(text.replace(mutation.old, mutation.new))
    test = f"tests/{mutation.test}"
    found = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", test],
        cwd=copy,
        env=os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    # 1: a test failed. Anything else is a mistake in the list: 4 no such test, 2 no such module.
    assert found.returncode == 1, found.stdout[-3000:] + found.stderr[-1000:]
    broken_import = "ImportError" in found.stdout or "SyntaxError" in found.stdout
    assert not broken_import, found.stdout[-3000:]
