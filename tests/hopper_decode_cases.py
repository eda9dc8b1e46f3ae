"""Calls of the decode kernels, interpreted and on a GPU, and the check of their results."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import flash_pallas as fp
from flash_pallas import reference
from flash_pallas.backends.hopper import HopperBackend
from flash_pallas.backends.hopper.decode.tiles import (
    DecodeBlocks,
    takes_upright,
    takes_wide,
    wide_rows,
    wide_upright,
)
from flash_pallas.backends.hopper.wide import latent
from flash_pallas.core import decode, softmax
from flash_pallas.decode import decode_from_ring

from . import checks, draft_masks


@dataclasses.dataclass(frozen=True)
class Step:
    """One decode call; up to head dim 256, KV blocks have 64 keys unless `block_kv` differs."""

    name: str
    lengths: tuple[int, ...]
    T: int = 1
    N: int = 4
    K: int = 1
    H: int = 64
    Hv: int = 64
    S: int = 256
    dtype: str = "bfloat16"
    page_size: int | None = None
    num_splits: int = 3
    block_kv: int = 64
    offset: tuple[int, ...] | None = None  # None: the queries are the last of the keys
    window: int | None = None
    starts: tuple[int, ...] | None = None  # first keys
    windows: tuple[int, ...] | None = None  # of each sequence, as an array
    softcap: float | None = None
    sides: tuple[str, ...] = ()
    upright: bool = True  # where the kernel has a choice
    cache: str | None = None  # dtype of a cache in eight bits
    scaled: str = ""  # "heads", or "rows": sequences or pages have their own scales
    shared: bool = False  # the values are the first Hv columns of the keys
    drafts: str | None = None  # kind of the draft mask, see draft_masks.py
    ring: int | None = None  # rows of the ring that the keys are in, from `starts` on

    def __str__(self) -> str:
        return self.name

    @property
    def spec(self) -> decode.DecodeSpec:
        return decode.DecodeSpec(
            self.H**-0.5,
            self.window,
            self.softcap,
            self.num_splits,
            self.page_size,
            v_columns=self.Hv if self.shared else None,
            ring=self.ring is not None,
        )

    def operands(self):
        """Draws (the kernel's operands, the same keys contiguous, all set); NaN past the keys."""
        rng, batch = np.random.default_rng(3), len(self.lengths)
        normal = lambda *shape: rng.standard_normal(shape).astype(jnp.dtype(self.dtype))
        given = np.array(self.lengths, np.int32)
        lengths = np.clip(given, 0, self.S)
        kv = [normal(batch, self.S, self.K, width) for width in (self.H, self.Hv)]
        key, sides = np.arange(self.S)[None], {}
        for x in kv:
            x[key >= lengths[:, None]] = np.nan
            if self.starts is not None:
                x[key < np.array(self.starts)[:, None]] = np.nan
        for name, given_side in (("kv_starts", self.starts), ("window_left", self.windows)):
            if given_side is not None:
                sides[name] = np.array(given_side, np.int32)
        # Where new tokens find no room, queries sit where they would in a longer cache.
        last = np.clip(given, 0, decode.UNBOUNDED)
        offset = last - self.T if self.offset is None else np.array(self.offset)
        if "sinks" in self.sides:
            sides["sinks"] = rng.standard_normal((batch, self.N)).astype(np.float32)
        if "slopes" in self.sides:
            sides["alibi_slopes"] = rng.uniform(0.0, 0.2, (batch, self.N)).astype(np.float32)
        if self.drafts:
            sides["draft_mask"] = draft_masks.drawn(rng, self.drafts, batch, self.T)
        q, offset = normal(batch, self.T, self.N, self.H), offset.astype(np.int32)
        whole = decode.DecodeOperands(q, kv[0], kv[1], lengths, offset, None, **sides)
        stored, whole = (whole, whole) if self.cache is None else self.quantised(whole)
        cache = stored if self.page_size is None else self.paged(rng, stored)
        if self.ring is not None:
            cache = self.rolled(stored, self.ring)
        said = None if self.offset is None else whole.q_offset
        if self.shared:
            whole = whole._replace(v=whole.k[..., : self.Hv])
            cache = cache._replace(v=None, v_scale=None)
        return cache._replace(kv_lengths=given, q_offset=said), whole

    def quantised(self, whole: decode.DecodeOperands):
        """Quantizes K and V: (8-bit cache, its values); power-of-two scales make both exact."""
        batch, paged = len(self.lengths), self.page_size is not None
        spans = self.S // (self.page_size or 0) if paged and self.scaled == "rows" else 1
        found, said, scales = [], [], []
        for x, order in zip(whole[1:3], (1, -1), strict=True):
            entries = batch if self.scaled == "rows" else 1
            number = np.arange(entries * spans * self.K).reshape(entries, spans, self.K)
            scale = np.exp2(number % 3 - 6)[..., ::order].astype(np.float32)
            if not self.scaled:
                scale = np.ones_like(scale)
            each = scale[:, :, None, :, None]
            y = x.astype(np.float32).reshape(batch, spans, -1, *x.shape[2:]) / each
            if self.cache == "int8":
                y = np.where(np.isnan(y), 127.0, np.clip(np.round(y), -128, 127))
            y = y.astype(jnp.dtype(self.cache))
            told = (y.astype(np.float32) * each).reshape(x.shape).astype(x.dtype)
            said.append(np.where(np.isnan(x), x, told))
            found.append(y.reshape(x.shape))
            scales.append(scale if spans > 1 else scale[:, 0])
        names = ("k_scale", "v_scale") if self.scaled else ()
        stored = whole._replace(k=found[0], v=found[1], **dict(zip(names, scales, strict=False)))
        return stored, whole._replace(k=said[0], v=said[1])

    def rolled(self, whole: decode.DecodeOperands, rows: int) -> decode.DecodeOperands:
        """Moves the same keys into a ring; NaN where it has none from `starts` on."""
        rings = [np.full((len(x), rows, *x.shape[2:]), np.nan, x.dtype) for x in whole[1:3]]
        for ring, x in zip(rings, whole[1:3], strict=True):
            for b, (start, length) in enumerate(
                zip(whole.kv_starts, whole.kv_lengths, strict=True)
            ):
                assert length - start <= rows
                for place in range(start, length):
                    ring[b, place % rows] = x[b, place]
        return whole._replace(k=rings[0], v=rings[1], kv_starts=whole.kv_starts + np.int32(rows))

    def paged(self, rng, whole: decode.DecodeOperands) -> decode.DecodeOperands:
        """Moves the same keys into shuffled pages; page ids past a length are invalid."""
        size, batch = self.page_size or 0, len(self.lengths)
        columns = self.S // size
        table = rng.permutation(batch * columns).reshape(batch, columns)
        pages = [np.empty((batch * columns, size, *x.shape[2:]), x.dtype) for x in whole[1:3]]
        for page, x in zip(pages, whole[1:3], strict=True):
            page[table] = x.reshape(batch, columns, size, *x.shape[2:])
        first = np.arange(columns)[None] * size
        unused = first >= whole.kv_lengths[:, None]
        if whole.kv_starts is not None:
            unused |= first + size <= whole.kv_starts[:, None]
        garbage = rng.choice([-1, -(2**31), 2**31 - 1], size=table.shape)
        scales = {}
        for name in ("k_scale", "v_scale"):
            given = getattr(whole, name)
            if given is not None and given.ndim == 3:  # [B, columns, K]
                scales[name] = np.empty((batch * columns, self.K), np.float32)
                scales[name][table] = given
                scales[name][table[unused]] = np.nan
        table = np.where(unused, garbage, table).astype(np.int32)
        return whole._replace(k=pages[0], v=pages[1], page_table=table, **scales)


STEPS = (
    Step("no_key_and_one", (0, 1)),
    Step("around_two_blocks", (127, 128, 129), num_splits=1),
    Step("lengths_out_of_range", (300, -7), page_size=64),
    Step("splits", (129, 256), N=8, K=2),
    Step("more_splits_than_blocks", (65, 3), num_splits=7, N=2),
    # Two warpgroups join 18 splits each; the last does not exist, and the one before has keys.
    Step("many_splits", (2300, 570), num_splits=35, N=2, S=2304, sides=("sinks",)),
    Step("four_tokens", (127, 129), T=4, N=8, K=2),
    Step("four_tokens_one_split", (1, 130), T=4, num_splits=1, sides=("sinks",)),
    Step("sixteen_tokens", (129, 256), T=16, N=4),
    Step("queries_as_rows", (127, 129), upright=False, num_splits=1),
    Step("two_tiles_of_rows", (200,), T=16, N=8, window=50, num_splits=2),
    Step("queries_before_keys", (200, 100), T=4, offset=(-2, 150)),
    Step("window", (200, 133), T=4, window=70, sides=("sinks",), num_splits=2),
    Step("modifiers", (200, 133), T=3, softcap=3.0, sides=("slopes", "sinks")),
    Step("one_head_each", (130,), N=2, K=2, H=128, Hv=128, dtype="float16"),
    Step("wide", (70,), H=256, Hv=256, num_splits=2),
    Step("narrow_values", (130,), H=80, Hv=32),
    # 64 heads and more of a latent cache.
    Step(
        "latent_pages_of_64",
        (200,),
        T=2,
        N=64,
        H=576,
        Hv=512,
        page_size=64,
        num_splits=2,
        shared=True,
    ),
    Step(
        "latent_pages_of_128",
        (256,),
        N=64,
        H=512,
        Hv=512,
        page_size=128,
        num_splits=1,
        shared=True,
    ),
    Step(
        "latent_heads",
        (131, 0, 300),
        N=128,
        H=576,
        Hv=512,
        S=264,
        num_splits=1,
        softcap=3.0,
        sides=("sinks",),
        shared=True,
        dtype="float16",
    ),
    Step(
        "latent_queries_before_keys",
        (130, 77),
        T=3,
        N=64,
        H=512,
        Hv=512,
        S=136,
        offset=(-1, 60),
        num_splits=3,
        sides=("sinks",),
        shared=True,
    ),
    Step(
        "latent_few_keys",
        (0, 1, 63, 64, 65, 192),
        N=64,
        H=576,
        Hv=512,
        S=192,
        num_splits=1,
        shared=True,
    ),
    Step(
        "latent_four_tokens",
        (66, 3),
        T=4,
        N=64,
        H=576,
        Hv=512,
        S=192,
        page_size=64,
        num_splits=1,
        shared=True,
        dtype="float16",
    ),
    # Above head dim 256 tiles.py has the blocks.
    Step("wide_512", (70, 0), H=512, Hv=512, S=96, num_splits=2),
    Step("latent", (95, 33), N=12, H=576, Hv=512, S=96, num_splits=1, sides=("sinks",)),
    Step(
        "latent_pages_of_16",
        (77, 90),
        T=2,
        N=40,
        H=576,
        Hv=512,
        S=96,
        page_size=16,
        dtype="float16",
        sides=("sinks",),
    ),
    Step(
        "wide_modifiers",
        (90, 61),
        T=3,
        N=8,
        K=2,
        H=272,
        Hv=336,
        S=96,
        num_splits=2,
        window=40,
        softcap=3.0,
        sides=("slopes", "sinks"),
    ),
    Step(
        "wide_starts",
        (96, 70),
        H=320,
        Hv=304,
        K=2,
        S=96,
        page_size=48,
        starts=(37, 64),
        windows=(50, 300),
        num_splits=2,
    ),
    Step("wide_512_as_rows", (70, 0), H=512, Hv=512, S=96, num_splits=2, upright=False),
    Step("keys_ahead", (300, 0, 64), N=8, H=512, Hv=512, S=320, num_splits=2),
    # The values are columns of the keys: in one tile above head dim 256, in two up to it.
    Step("shared", (130, 77), H=96, Hv=64, page_size=16, num_splits=2, shared=True),
    Step("shared_int8", (130, 77), H=128, Hv=64, cache="int8", scaled="rows", shared=True),
    Step("shared_latent", (150, 0, 64), N=16, H=576, Hv=512, S=192, sides=("sinks",), shared=True),
    Step(
        "shared_latent_pages",
        (150, 77),
        T=2,
        N=8,
        H=576,
        Hv=512,
        S=192,
        page_size=16,
        dtype="float16",
        shared=True,
    ),
    Step("shared_narrow_swizzle", (150, 77), K=2, H=304, Hv=272, S=192, num_splits=1, shared=True),
    Step("shared_rows", (150, 64), N=40, H=576, Hv=512, S=192, page_size=64, shared=True),
    Step("shared_rows_alone", (150, 61), T=4, N=5, H=304, Hv=208, S=192, shared=True),
    Step(
        "shared_rows_everything",
        (180, 161),
        T=3,
        N=8,
        H=320,
        Hv=304,  # two parts of 192 columns: more than K has
        S=192,
        page_size=48,
        starts=(37, 100),
        window=60,
        softcap=3.0,
        num_splits=2,
        sides=("slopes", "sinks"),
        shared=True,
    ),
    Step("wide_keys", (70, 33), T=4, H=304, Hv=80, S=96, num_splits=1),
    Step("wide_values", (70,), H=64, Hv=352, S=96, num_splits=2, dtype="float16"),
    Step("pages_of_16", (200, 77), page_size=16, sides=("sinks",)),
    Step("pages_of_48", (200, 133), T=4, S=240, page_size=48),
    Step("pages_of_64", (64, 129), N=8, K=2, page_size=64),
    Step("pages_of_256", (500, 255), S=512, page_size=256, block_kv=128, num_splits=2),
    Step("starts", (0, 200, 133, 256, 77), starts=(0, 63, 64, 130, -5), sides=("sinks",)),
    Step("starts_at_the_end", (128, 128, 70), starts=(128, 127, 300), num_splits=2),
    Step("starts_alone", (129, 256), T=4, N=8, K=2, starts=(65, 1), num_splits=1, softcap=3.0),
    Step("starts_as_rows", (140, 66), T=9, N=8, starts=(65, 40), sides=("slopes",)),
    Step("starts_and_window", (250, 133), T=4, starts=(90, 128), window=70, sides=("sinks",)),
    Step("windows", (200, 133, 256), T=4, windows=(70, 0, 2**30 - 1), num_splits=2),
    Step("windows_as_rows", (250, 133), T=5, N=4, windows=(64, 300), upright=False),
    Step("starts_and_windows", (250, 133), starts=(90, 128), windows=(300, 64), S=256),
    Step("starts_of_pages_of_16", (200, 177), starts=(70, 39), page_size=16),
    Step("starts_of_pages_of_48", (200, 133), T=4, S=240, page_size=48, starts=(70, 39)),
    Step("starts_of_pages_of_64", (200, 256), T=4, N=8, starts=(65, 191), page_size=64),
    Step(
        "starts_of_int8",
        (200, 177),
        K=2,
        starts=(70, 39),
        page_size=16,
        cache="int8",
        scaled="rows",
    ),
    Step(
        "starts_of_float8",
        (250, 131),
        T=4,
        starts=(90, 128),
        windows=(300, 64),
        cache="float8_e4m3fn",
        scaled="heads",
    ),
    Step(
        "starts_of_float8_as_rows",
        (250, 131),
        starts=(90, 128),
        page_size=32,
        cache="float8_e4m3fn",
        scaled="rows",
        upright=False,
    ),
    # Keys around the end of a ring, in it and before it, and copies of 16 rows.
    Step(
        "ring",
        (200, 77, 129, 0),
        N=8,
        K=2,
        starts=(73, 0, 128, 0),
        ring=128,
        window=100,
        num_splits=2,
    ),
    Step("ring_in_pieces", (256, 100, 1), starts=(145, 37, 1), ring=112, sides=("slopes", "sinks")),
    Step("ring_wide", (95, 61), H=512, Hv=512, S=96, starts=(40, 0), ring=80, num_splits=2),
    # Drafts that begin before a block, in it and with it; a sequence that has fewer keys than them.
    Step("drafts", (130, 68, 2), T=4, drafts="trees", num_splits=2, sides=("sinks",)),
    # New tokens that the cache has no room for: some, all, and some of drafts.
    Step("without_room", (257, 259, 300), T=4, N=8, window=40, num_splits=2, sides=("slopes",)),
    Step("drafts_without_room", (258, 270), T=16, N=1, drafts="trees", window=40, page_size=64),
    Step("drafts_as_rows", (131,), T=40, N=1, drafts="trees", num_splits=2),
    Step("drafts_of_64", (80,), T=64, N=1, page_size=16, drafts="any", num_splits=1, S=128),
    Step(
        "drafts_in_windows",
        (200, 15),
        T=16,
        N=1,
        drafts="trees",
        windows=(3, 1),
        starts=(182, 4),
        page_size=64,
        num_splits=1,
    ),
    Step(
        "drafts_in_tiles",
        (131,),
        T=33,
        N=2,
        drafts="any",
        window=20,
        softcap=3.0,
        num_splits=2,
        block_kv=32,
    ),
    Step("drafts_of_int8", (65,), T=4, drafts="any", page_size=16, cache="int8", scaled="rows"),
    Step("drafts_wide", (70,), T=12, H=512, Hv=512, S=96, drafts="trees", num_splits=1),
    Step("int8", (127, 130), N=8, K=2, cache="int8", scaled="heads"),
    Step(
        "int8_pages_of_16",
        (200, 77),
        K=2,
        page_size=16,
        cache="int8",
        scaled="rows",
        dtype="float16",
    ),
    # Seven blocks of one CTA, whose scales are loaded two ahead.
    Step(
        "int8_pages_of_64",
        (430, 70),
        K=2,
        S=512,
        page_size=64,
        num_splits=1,
        cache="int8",
        scaled="rows",
    ),
    Step("int8_as_rows", (200, 77), page_size=32, cache="int8", scaled="rows", upright=False),
    Step("int8_unscaled", (200,), N=2, H=96, Hv=32, dtype="float16", num_splits=1, cache="int8"),
    Step("float8", (250, 0), K=2, H=128, num_splits=1, cache="float8_e4m3fn", scaled="rows"),
    Step(
        "float8_pages_of_64",
        (64, 131),
        T=4,
        num_splits=2,
        page_size=64,
        window=70,
        softcap=3.0,
        sides=("slopes", "sinks"),
        cache="float8_e4m3fn",
        scaled="rows",
    ),
    # Above head dim 256 the producer widens, upright too.
    Step("wide_int8", (130, 0), H=512, Hv=512, S=192, num_splits=2, cache="int8", scaled="heads"),
    Step(
        "wide_float8_pages",
        (77, 131),
        K=2,
        H=320,
        Hv=288,
        S=192,
        page_size=16,
        dtype="float16",
        num_splits=2,
        starts=(3, 70),
        sides=("sinks",),
        cache="float8_e4m3fn",
        scaled="rows",
    ),
    Step(
        "wide_float8_as_rows",
        (70, 95),
        T=5,
        H=512,
        Hv=512,
        S=96,
        page_size=16,
        num_splits=1,
        cache="float8_e4m3fn",
        scaled="rows",
    ),
    Step("wide_int8_keys", (70, 33), T=5, H=352, Hv=96, S=96, num_splits=2, cache="int8"),
    Step(
        "shared_latent_float8",
        (150, 0, 64),
        N=16,
        H=576,
        Hv=512,
        S=192,
        page_size=64,
        cache="float8_e4m3fn",
        scaled="rows",
        shared=True,
    ),
    Step(
        "shared_rows_float8",
        (150, 61),
        N=40,
        H=576,
        Hv=512,
        S=192,
        page_size=16,
        num_splits=2,
        cache="float8_e4m3fn",
        scaled="rows",
        shared=True,
    ),
    Step(
        "shared_rows_alone_int8",
        (50, 33),
        T=5,
        H=288,
        Hv=192,
        S=96,
        num_splits=1,
        dtype="float16",
        cache="int8",
        scaled="heads",
        shared=True,
    ),
)


# The longest cache has one sequence that fills it, and those whose ends lie around a block.
LONG = Step("long", (0, 1, 63, 64, 65, 131072), S=131072, num_splits=33)
ON_DEVICE = (
    LONG,
    dataclasses.replace(LONG, name="long_pages", T=4, page_size=64, num_splits=16),
    *(
        step
        for step in STEPS
        if step.name in ("modifiers", "wide", "pages_of_16", "narrow_values", "two_tiles_of_rows")
        or max(step.H, step.Hv) > 256
        or step.shared
        or step.starts is not None
        or step.windows is not None
        or step.cache is not None
        or step.drafts is not None
    ),
    dataclasses.replace(
        LONG,
        name="long_starts",
        lengths=(0, 131072, 131072, 131072),
        starts=(0, 100_000, 131_071, 64),
        num_splits=16,
    ),
    Step("odd_group", (200, 77), T=3, N=10, K=2, num_splits=1, sides=("sinks",)),
    Step("long_wide", (0, 31, 8192), N=16, K=2, H=512, Hv=512, S=8192, num_splits=33),
    Step(
        "long_latent",
        (1, 33, 8191),
        N=128,
        H=576,
        Hv=512,
        S=8192,
        page_size=64,
        num_splits=16,
        sides=("sinks",),
    ),
    *(
        Step(
            f"long_shared_{heads}",
            (1, 65, 8191),
            N=heads,
            H=576,
            Hv=512,
            S=8192,
            page_size=page_size,
            num_splits=33,
            shared=True,
        )
        for heads, page_size in ((16, None), (64, 64), (128, None))
    ),
    *(
        Step(
            f"long_shared_float8_{heads}",
            (1, 65, 8191),
            N=heads,
            H=576,
            Hv=512,
            S=8192,
            page_size=64,
            num_splits=33,
            cache="float8_e4m3fn",
            scaled="rows",
            shared=True,
        )
        for heads in (16, 64)
    ),
    dataclasses.replace(LONG, name="long_int8", cache="int8", scaled="heads"),
    dataclasses.replace(LONG, name="long_pages_int8", page_size=64, cache="int8", scaled="rows"),
)


def run(backend: HopperBackend, step: Step, stages: int = 2):
    """Runs the decode kernel; returns ((o, lse), the same operands with a contiguous cache)."""
    given, whole = step.operands()
    problem = decode.describe(given, step.spec)
    assert backend.decode.refusal(problem) is None
    upright = step.upright and takes_upright(problem)
    blocks = DecodeBlocks(step.block_kv, stages, step.num_splits, upright=upright)
    if takes_wide(problem):
        found = wide_upright(problem) if upright else wide_rows(problem)
        blocks = dataclasses.replace(found or blocks, num_splits=step.num_splits)
    if latent.takes(problem):
        blocks = latent.LatentBlocks(num_splits=step.num_splits)
    found = jax.jit(lambda x: backend.decode.run(step.spec, blocks, x))(given)
    return (found.o, softmax.natural(found.lse_log2)), whole


def decodes(backend: str, step: Step) -> str | None:
    """Checks a step as a call of flash_decode; returns why the backend refuses it, or None."""
    given, whole = step.operands()
    options: dict[str, Any] = {"softcap": step.softcap, "num_splits": step.num_splits}
    if step.scaled == "heads":  # as users have them: one per head
        one = lambda scale: None if scale is None else scale[0]
        given = given._replace(k_scale=one(given.k_scale), v_scale=one(given.v_scale))
    if step.shared:
        options["v_head_dim"] = step.Hv
    arrays = given._asdict()
    window, prefix = arrays.pop("window_left"), arrays.pop("prefix_lengths")
    assert prefix is None  # no `Step` has shared prefixes
    options["window"] = step.window if window is None else (window, None)
    try:
        if step.ring is None:
            found = fp.flash_decode(**arrays, **options, backend=backend, return_lse=True)
        else:
            found = _from_ring(arrays, options, backend)
    except fp.UnsupportedByBackend as error:
        return str(error)
    assert_matches_oracle(step, whole, found)
    return None


def _from_ring(arrays: dict[str, Any], options: dict[str, Any], backend: str):
    """Returns (o, lse) of a step on a ring, which layers call."""
    options = options | {name: arrays[name] for name in ("sinks", "alibi_slopes")}
    places = (jnp.asarray(arrays[name]) for name in ("kv_lengths", "kv_starts"))
    return decode_from_ring(*(arrays[x] for x in "qkv"), *places, **options, backend=backend)


def assert_matches_oracle(step: Step, whole: decode.DecodeOperands, found):
    """Checks that results are no further from the oracle than twice plain jnp; see checks.py."""
    window = (step.window, 0) if step.window is not None else None
    options = {"window": window, "softcap": step.softcap, "sinks": whole.sinks}
    options |= {"q_offset": whole.q_offset, "kv_lengths": whole.kv_lengths}
    options |= {"alibi_slopes": whole.alibi_slopes, "causal": True}
    if step.windows is not None:
        options["window"] = (jnp.asarray(whole.window_left), 0)
    if step.drafts is not None:
        window = step.window if whole.window_left is None else whole.window_left
        lengths = np.asarray(whole.q_offset) + step.T
        mask, q_pos, kv_pos = draft_masks.seen(whole.draft_mask, lengths, step.S, window)
        for name in ("q_offset", "window"):
            del options[name]
        options |= {"causal": False, "mask": mask}
        if whole.alibi_slopes is not None:
            options |= {"q_positions": q_pos, "kv_positions": kv_pos}
    if step.starts is not None:
        keys = np.broadcast_to(np.arange(step.S)[None], (len(step.lengths), step.S))
        ids = np.where(keys < whole.kv_starts[:, None], -1, 0).astype(np.int32)
        options |= {"q_segment_ids": np.zeros((len(ids), step.T), np.int32), "kv_segment_ids": ids}
    assert_near(str(step), whole[:3], options, found)


def assert_near(name: str, arrays, options: dict, found):
    """Checks (o, lse) of a call by the 2x rule: against the oracle and plain jnp on (q, k, v)."""
    dtype, softcap = arrays[0].dtype, options["softcap"]
    attend = lambda function: jax.jit(lambda *x: function(*x, **options))
    near = attend(checks.plain)(*arrays)
    with jax.enable_x64(True):
        q, k, v = (np.asarray(x).astype(np.float64) for x in arrays)
        exact = [np.asarray(x) for x in attend(reference.attention)(q, k, v)]
        terms = np.asarray(attend(reference.attention)(q, k, np.abs(v))[0])
    largest = np.abs(np.where(np.isfinite(exact[1]), exact[1], 0.0)) + np.sqrt(arrays[0].shape[-1])
    # As in checks.py, exp(s - lse) inherits the rounding of s and of lse, in float32.
    relative = float(jnp.finfo(jnp.float32).eps / jnp.finfo(dtype).eps)
    terms = terms * (1.0 + relative * largest.swapaxes(1, 2)[..., None])
    floors = (terms, checks.FLOOR, dtype, 0.0), (largest, checks.LSE_FLOOR, "float32", 1.0)
    for got, plain, right, (size, share, of, tangents) in zip(
        found, near, exact, floors, strict=True
    ):
        wide = (np.asarray(x).astype(np.float64) for x in (got, plain))
        errors = [checks._sizes(checks._error(x, right)) for x in wide]
        known = tangents * checks.TANH_ERROR * (softcap or 0.0)
        known += share * float(jnp.finfo(of).eps)
        for error, allowed, least in zip(*errors, checks._sizes(size), strict=True):
            limit = checks.OUTPUT_FACTOR * allowed + known * least
            assert error <= limit, f"{name}: error {error:.3g}, allowed {limit:.3g}"
