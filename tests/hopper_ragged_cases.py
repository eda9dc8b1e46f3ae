"""Mixes of prompts and steps for the ragged kernel, and the check of its results."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

import flash_pallas as fp
from flash_pallas.backends.hopper.ragged.kernel import ragged_chunks
from flash_pallas.backends.hopper.ragged.tiles import choose_chunk_blocks, unsupported_chunks
from flash_pallas.core import ragged, softmax
from flash_pallas.core.decode import DecodeSpec

from .hopper_decode_cases import assert_near


@dataclasses.dataclass(frozen=True)
class Mix:
    """One ragged call; sequence s has counts[s] queries, the last of lengths[s] keys."""

    name: str
    counts: tuple[int, ...]
    lengths: tuple[int, ...]
    tokens: int  # rows of q; those past the last sequence hold NaN
    N: int = 2
    K: int = 1
    H: int = 64
    Hv: int = 64
    dtype: str = "bfloat16"
    page_size: int = 16
    max_pages: int = 16
    step_tokens: int = 1
    window: int | None = None
    starts: tuple[int, ...] | None = None
    windows: tuple[int, ...] | None = None
    softcap: float | None = None
    sides: tuple[str, ...] = ()
    blocks: tuple[tuple[str, int], ...] = ()  # fields of ForwardBlocks
    spare: int = 1  # sequences that are not there

    def __str__(self) -> str:
        return self.name

    @property
    def spec(self) -> ragged.RaggedSpec:
        decode = DecodeSpec(self.H**-0.5, self.window, self.softcap, page_size=self.page_size)
        return ragged.RaggedSpec(decode, self.step_tokens)

    def operands(self):
        """Draws (the operands, (q, k, v) of each sequence in a padded batch); NaN in padding."""
        rng, seqs = np.random.default_rng(5), len(self.counts)
        normal = lambda *shape: rng.standard_normal(shape).astype(jnp.dtype(self.dtype))
        room, columns, size = self.page_size * self.max_pages, self.max_pages, self.page_size
        rows = seqs + self.spare
        lengths, ends = np.zeros(rows, np.int32), np.zeros(rows + 1, np.int32)
        lengths[:seqs], ends[1 : seqs + 1] = self.lengths, np.cumsum(self.counts)
        ends[seqs + 1 :] = -3
        q = normal(self.tokens, self.N, self.H)
        q[sum(self.counts) :] = np.nan
        whole, pages = [], []
        table = rng.permutation(seqs * columns).reshape(seqs, columns)
        key = np.arange(room)[None]
        valid = key < lengths[:seqs, None]
        if self.starts is not None:
            valid &= key >= np.array(self.starts)[:, None]
        for width in (self.H, self.Hv):
            x = normal(seqs, room, self.K, width)
            x[~valid] = np.nan
            paged = np.empty((seqs * columns, size, self.K, width), x.dtype)
            paged[table] = x.reshape(seqs, columns, size, self.K, width)
            whole.append(x)
            pages.append(paged)
        used = valid.reshape(seqs, columns, size).any(axis=2)
        garbage = rng.choice([-1, -(2**31), 2**31 - 1], size=(rows, columns))
        garbage[:seqs][used] = table[used]
        sides = self._sides(rng, rows)
        given = ragged.RaggedOperands(
            q,
            *pages,
            kv_lengths=lengths,
            page_table=garbage.astype(np.int32),
            cu_q_lens=ends,
            num_seqs=np.int32(seqs),
            **sides,
        )
        padded = np.zeros((seqs, max(self.counts), self.N, self.H), q.dtype)
        for s, count in enumerate(self.counts):
            padded[s, :count] = q[ends[s] : ends[s] + count]
        return given, (padded, *whole)

    def _sides(self, rng, rows: int) -> dict:
        found = {}
        if "sinks" in self.sides:
            found["sinks"] = rng.standard_normal((rows, self.N)).astype(np.float32)
        if "slopes" in self.sides:
            found["alibi_slopes"] = rng.uniform(0.0, 0.2, (rows, self.N)).astype(np.float32)
        for name, given in (("kv_starts", self.starts), ("window_left", self.windows)):
            if given is not None:
                found[name] = np.array((*given, *(0,) * self.spare), np.int32)
        return found


# One warpgroup and narrow blocks: the same code in fewer steps. Two CTAs go through the tiles.
SMALL = (("warpgroups", 1), ("block_kv", 64))
MIXES = (
    # Steps before and behind, two prompts next to each other, and tokens that are no multiple of 8.
    Mix("steps_between", (1, 66, 67, 1, 0), (40, 66, 256, 31, 1), 150, N=1, blocks=SMALL),
    # Positions below 0; one query more than a step; a page has two blocks of keys.
    Mix(
        "pages_of_128",
        (20, 4, 5, 65),
        (7, 4, 140, 193),
        96,
        page_size=128,
        max_pages=2,
        step_tokens=4,
        softcap=3.0,
        sides=("sinks",),
        blocks=SMALL,
    ),
    Mix(
        "starts_and_window",
        (3, 70, 90, 12),
        (3, 250, 120, 15),
        192,
        window=90,
        starts=(0, 100, 0, 20),
        blocks=SMALL,
    ),
    Mix(
        "starts_and_windows",
        (66, 40, 9),
        (250, 200, 256),
        120,
        starts=(70, -3, 240),
        windows=(60, 2**30 - 1, 7),
        page_size=32,
        max_pages=8,
        blocks=SMALL,
    ),
    Mix(
        "without_room",
        (66, 20, 4, 30),
        (270, 140, 131, 158),
        120,
        window=90,
        page_size=64,
        max_pages=2,
        step_tokens=4,
        sides=("slopes",),
        blocks=SMALL,
    ),
    Mix("starts", (66, 40), (250, 200), 112, starts=(70, 160), sides=("slopes",), blocks=SMALL),
    Mix("two_warpgroups", (130, 67), (240, 70), 200, H=128, Hv=128, dtype="float16"),
    Mix("three_warpgroups", (7, 193, 30), (140, 256, 40), 240, page_size=64, max_pages=4),
    Mix("not_persistent", (70, 130), (200, 140), 208, H=256, Hv=256, page_size=64, max_pages=4),
    Mix("narrow_values", (70, 30), (100, 64), 104, H=192, Hv=128, page_size=48, max_pages=4),
    Mix("narrow_keys", (70, 30), (100, 64), 104, H=32, Hv=64, page_size=96, max_pages=2, window=0),
    Mix("no_producer", (70, 1, 67), (100, 9, 131), 144, blocks=(*SMALL, ("producer", False))),
    Mix(
        "everything",
        (70, 4, 20),
        (190, 60, 9),
        96,
        page_size=128,
        max_pages=2,
        step_tokens=4,
        windows=(80, 9, 2**30 - 1),
        softcap=4.0,
        starts=(20, 10, 3),
        sides=("slopes", "sinks"),
        blocks=SMALL,
    ),
    Mix("steps_alone", (1,) * 8, (9,) * 8, 8, max_pages=1, blocks=SMALL),
)


# As the rules choose the tiles, many for every CTA, and all that MIXES have.
PROMPTS = {"counts": (1, 2000, 1, 777, 130), "lengths": (70, 2300, 900, 777, 2500)}
ON_DEVICE = (
    *MIXES,
    *(
        Mix(
            f"prompts_{H}_{page_size}",
            **PROMPTS,
            tokens=3000,
            N=8,
            K=2,
            H=H,
            Hv=H,
            page_size=page_size,
            max_pages=2560 // page_size,
        )
        for H, page_size in ((64, 16), (64, 128), (128, 16), (128, 128), (128, 256), (256, 32))
    ),
)


def run(mix: Mix, num_sms: int = 2, interpret: bool = True):
    """Runs the kernel; returns (o [tokens, N, Hv], lse [N, tokens]), and the padded batch."""
    given, whole = mix.operands()
    spec = mix.spec
    problem = ragged.describe(given, spec)
    assert unsupported_chunks(problem) is None
    blocks = dataclasses.replace(choose_chunk_blocks(problem, num_sms), **dict(mix.blocks))

    def call(operands):
        found = ragged_chunks(blocks, problem, ragged.in_range(operands), num_sms, interpret)
        lse = softmax.natural(found.lse_log2, found.shift, problem.steps.unit)
        return found.o, lse

    return jax.jit(call)(given), whole


def run_public(mix: Mix, num_splits: int = 1):
    """Runs ragged_paged_attention on the hopper backend; returns what `run` does."""
    given, whole = mix.operands()
    given = jax.tree.map(jnp.asarray, given._asdict())
    q, k, v = (given.pop(name) for name in ("q", "k", "v"))
    window = mix.window if mix.windows is None else given.pop("window_left")
    for name in ("window_left", "prefix_lengths"):
        given.pop(name, None)
    call = functools.partial(
        fp.ragged_paged_attention,
        step_tokens=mix.step_tokens,
        softcap=mix.softcap,
        num_splits=num_splits,
        backend="hopper",
        return_lse=True,
    )
    window = None if window is None else (window, 0)
    # Traced, as integers out of range are errors where they are known.
    places = {name: given.pop(name) for name in ("kv_lengths", "kv_starts") if name in given}
    run = jax.jit(lambda places: call(q, k, v, window=window, **given, **places))
    return run(places), whole


def assert_matches_oracle(mix: Mix, found, whole, least: int | None = None):
    """Checks the rows of sequences with `least` queries by the 2x rule; see checks.py.

    None is one more than a step has: those of prompts.
    """
    least = mix.step_tokens + 1 if least is None else least
    o, lse = (np.asarray(x) for x in found)
    given, _ = mix.operands()
    seqs, most = len(mix.counts), max(mix.counts)
    token = np.arange(most)[None]
    counts, lengths = np.array(mix.counts), np.array(mix.lengths)
    is_known = (counts >= least)[:, None] & (token < counts[:, None])
    padded_o = np.zeros((seqs, most, *o.shape[1:]), o.dtype)
    padded_lse = np.full((seqs, mix.N, most), -np.inf, np.float32)
    ends = np.asarray(given.cu_q_lens)
    for s, count in enumerate(mix.counts):
        if count >= least:
            padded_o[s, :count] = o[ends[s] : ends[s] + count]
            padded_lse[s, :, :count] = lse[:, ends[s] : ends[s] + count]
    assert not np.any(o[sum(mix.counts) :])
    window = (mix.window, 0) if mix.window is not None else None
    if mix.windows is not None:
        window = (jnp.asarray(mix.windows, jnp.int32), 0)
    own = lambda x: None if x is None else x[:seqs]
    key = np.arange(whole[1].shape[1])[None]
    start = np.zeros(seqs, int) if mix.starts is None else np.array(mix.starts)
    options = {
        "causal": True,
        "window": window,
        "softcap": mix.softcap,
        "sinks": own(given.sinks),
        "alibi_slopes": own(given.alibi_slopes),
        "q_offset": (lengths - counts).astype(np.int32),
        "kv_lengths": lengths.astype(np.int32),
        "q_segment_ids": np.where(is_known, 0, -1).astype(np.int32),
        "kv_segment_ids": np.where(key < start[:, None], -1, 0).astype(np.int32),
    }
    if mix.sides and "sinks" in mix.sides:
        sinks = np.broadcast_to(given.sinks[:seqs, :, None], padded_lse.shape)
        padded_lse = np.where(is_known[:, None], padded_lse, sinks)
    assert_near(str(mix), whole, options, (padded_o, padded_lse))
