"""The table of features that says what runs where, generated from the backends' answers.

`python -m tests.feature_table` writes it into docs/which-kernel-runs.md. It also writes what has
run on which GPU, generated from benchmarks/results/gpu_coverage*.json, into that page, README.md
and docs/index.md. tests/test_readme.py compares.
"""

from __future__ import annotations

import collections
import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flash_pallas import BlockMask, devices
from flash_pallas.backends.cudnn import OLDEST, CudnnBackend
from flash_pallas.backends.hopper import HopperBackend
from flash_pallas.backends.portable import PortableBackend
from flash_pallas.backends.xla import XlaBackend
from flash_pallas.core import ragged
from flash_pallas.core.decode import QUANTISED
from flash_pallas.core.decode import describe as describe_decode
from flash_pallas.coverage.calls import Row
from flash_pallas.coverage.rows import TARGETS
from flash_pallas.frontend import validate, validate_decode, validate_ragged
from flash_pallas.frontend.arguments import Arguments
from flash_pallas.frontend.validate_decode import DecodeArguments
from flash_pallas.frontend.validate_ragged import RaggedArguments

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "which-kernel-runs.md"
RESULTS = ROOT / "benchmarks" / "results"

B, T, S, N = 2, 16, 32, 4
_IDS = {
    "q_segment_ids": jnp.zeros((B, T), jnp.int32),
    "kv_segment_ids": jnp.zeros((B, S), jnp.int32),
}
_POSITIONS = {
    "causal": True,
    "q_positions": jnp.zeros((B, T), jnp.int32),
    "kv_positions": jnp.zeros((B, S), jnp.int32),
}
_LENGTHS = {"q_lengths": 3, "kv_lengths": 3}
_MOD = {"score_mod": lambda score, b, n, i, j: score + 1.0}
_HIGHEST = {"precision": "highest"}
_MASK_MOD = {"mask_mod": lambda b, n, i, j: j <= i}
_ENDS = jnp.zeros(B + 1, jnp.int32)
_INDICES = np.zeros((1, 1, 1, 1), np.int32)
_BLOCK_MASK = {"block_mask": BlockMask.from_indices(_INDICES, q_len=T, kv_len=S)}
_DRAFTS = jnp.ones((T, T), bool)
_SCALES = {name: jnp.ones((B, 2)) for name in ("k_scale", "v_scale")}
_ALL: dict[str, Any] = {
    "causal": True,
    "window": 9,
    "softcap": 2.0,
    "bias": jnp.zeros((B, N, T, S)),
    "mask": jnp.ones((B, 1, T, S), bool),
    "alibi_slopes": jnp.ones(N),
    "sinks": jnp.ones(N),
    "dropout_rate": 0.1,
    "dropout_seed": 0,
    **_IDS,
    **_LENGTHS,
    **_MOD,
    **_MASK_MOD,
}
# What, how it is said, whether it has a gradient of its own, an example.
ROWS: list[tuple[str, str, str, dict[str, Any]]] = [
    ("causal", "`causal=True`", "", {"causal": True}),
    ("sliding window", "`window=w`, `(left, right)`", "", {"window": (3, None)}),
    ("position of the queries", "`q_offset` int or `[B]`", "", {"q_offset": 1, "causal": True}),
    ("packed documents", "`q_segment_ids`, `kv_segment_ids`", "", _IDS),
    ("masks by position", "`q_positions`, `kv_positions`", "", _POSITIONS),
    ("window that is data", "`window=jnp.array(w)`", "", {"window": jnp.array(9)}),
    ("padding", "`q_lengths`, `kv_lengths`", "", _LENGTHS),
    ("bias", "`bias` `[1 or B, 1 or N, 1 or T, 1 or S]`", "yes", {"bias": jnp.ones((1, N, 1, S))}),
    ("mask", "`mask`, the same shapes", "", {"mask": jnp.ones((B, 1, 1, S), bool)}),
    ("softcap", "`softcap`", "", {"softcap": 2.0}),
    ("ALiBi", "`alibi_slopes` `[N]` or `[B, N]`", "yes", {"alibi_slopes": jnp.ones(N)}),
    ("attention sinks", "`sinks` `[N]` or `[B, N]`", "yes", {"sinks": jnp.ones(N)}),
    ("dropout", "`dropout_rate`, `dropout_seed`", "", {"dropout_rate": 0.1, "dropout_seed": 0}),
    ("your own scores", "`score_mod`", "of what it captures", _MOD),
    ("your own mask", "`mask_mod`", "", _MASK_MOD),
    ("all of these together", "", "", _ALL),
    ("blocks of your own", "`block_mask`", "", _BLOCK_MASK),
    ("log-sum-exp", "`flash_attention_with_lse`", "yes", {}),
    ("bit-identical gradients", "`deterministic=True`", "", {"deterministic": True}),
    ("head dims up to 256, `Hv` other than `H`", "", "", {"H": 192, "Hv": 128}),
    ("head dims from 257 to 512", "", "", {"H": 320}),
    ("head dims above 512", "", "", {"H": 576}),
    ("float32", "`precision`", "", {"dtype": jnp.float32}),
    ("float32, head dims above 128", "", "", {"dtype": jnp.float32, "H": 192}),
    ("float32 in full", '`precision="highest"`', "", {"dtype": jnp.float32, **_HIGHEST}),
    ("float64", "", "", {"dtype": jnp.float64}),
]
# Derivatives beyond the gradient are jnp where a backend has no kernel for them.
BEYOND = (
    ("tangents in a kernel", '`differentiable="any"`'),
    ("Hessian-vector products in a kernel", "likewise"),
)
# Ragged attention over pages, which has arguments of its own. What, how it is said, dtype of pages.
PAGED = (
    ("prompts and steps over pages", "`ragged_paged_attention`", jnp.bfloat16),
    ("pages in eight bits", "`ragged_paged_attention`, `k_scale`, `v_scale`", jnp.int8),
)
# Decoding: what, how it is said, an example. Sixteen new tokens of a cache.
DECODES: list[tuple[str, str, dict[str, Any]]] = [
    ("decoding, trees of drafts", "`draft_mask` of `flash_decode`", {"draft_mask": _DRAFTS}),
    (
        "decoding, trees of drafts with ALiBi",
        "likewise",
        {"draft_mask": _DRAFTS, "alibi_slopes": jnp.ones(N)},
    ),
    (
        "decoding, prefixes that sequences share",
        "`shared_prefix`",
        {
            "shared_prefix": "auto",
            "page_table": jnp.zeros((B, 2), jnp.int32),
            "kv_lengths": jnp.full(B, T),
        },
    ),
    *(
        (f"decoding, a cache in {dtype}", "`k_scale`, `v_scale`", {"dtype": dtype} | _SCALES)
        for dtype in QUANTISED
    ),
]
# By row: what a backend may run that does not run the example; then it is said to run "some".
SOME: dict[str, dict[str, Any]] = {
    "sliding window": {"window": (3, 0)},
    "bias": {"bias": jnp.ones((1, N, T, S), jnp.bfloat16)},
    "mask": {"mask": jnp.ones((B, 1, T, S), bool)},
    "head dims up to 256, `Hv` other than `H`": {"H": 128},
}


def _takes(backend, example: dict[str, Any]) -> bool:
    head_dim, dtype = example.get("H", 64), example.get("dtype", jnp.bfloat16)
    sizes = ("H", "Hv", "dtype")
    arguments = {name: x for name, x in example.items() if name not in sizes}
    shapes = (B, T, N, head_dim), (B, S, 2, head_dim), (B, S, 2, example.get("Hv", head_dim))
    with jax.enable_x64(True):
        arrays = [jnp.zeros(shape, dtype) for shape in shapes]
        problem = validate.canonicalize(*arrays, Arguments(**arguments)).problem
    if backend.attention.refusal(problem):
        return False
    backend.attention.plan(problem)  # raises where no tiles fit
    return True


def _runs(backend, what: str, example: dict[str, Any]) -> str:
    if _takes(backend, example):
        return "yes"
    return "some" if what in SOME and _takes(backend, SOME[what]) else "no"


def _paged(backend, dtype) -> str:
    """Returns whether a backend has kernels for all of a ragged call; "some": for steps alone."""
    pages, found = jnp.zeros((4, 16, 2, 64), dtype), []
    for tokens in (T, 1):
        places = RaggedArguments(jnp.zeros(B, jnp.int32), jnp.zeros((B, 2), jnp.int32), _ENDS)
        q = jnp.zeros((tokens, N, 64), jnp.bfloat16)
        spec, operands = validate_ragged.canonicalize(q, pages, pages, places)
        problem = ragged.describe(operands, spec)
        runs = backend.ragged.refusal(problem) is None
        found.append(runs and backend.ragged.plan(problem).chunks_on == backend.name)
    return {0: "no", 1: "some", 2: "yes"}[sum(found)]


def _decodes(backend, example: dict[str, Any]) -> str:
    """Returns "yes" or "no": whether a backend runs a call of flash_decode."""
    dtype = example.get("dtype", jnp.bfloat16)
    q, kv = jnp.zeros((B, T, N, 64), jnp.bfloat16), jnp.zeros((B, S, 2, 64), dtype)
    arguments = DecodeArguments(**{name: x for name, x in example.items() if name != "dtype"})
    spec, operands = validate_decode.canonicalize(q, kv, kv, arguments)
    return "no" if backend.decode.refusal(describe_decode(operands, spec)) else "yes"


def _beyond(backend) -> list[str]:
    """Returns what a backend answers to the rows of BEYOND."""
    found, qkv = [], frozenset("qkv")
    for example in ({}, {"softcap": 2.0}):
        q, kv = (jnp.zeros((B, x, N, 64), jnp.bfloat16) for x in (T, S))
        problem = validate.canonicalize(q, kv, kv, Arguments(**example)).problem
        blocks = None if backend.attention.refusal(problem) else backend.attention.plan(problem)
        first = blocks and backend.jvp.refusal(problem, blocks, qkv, primal=False) is None
        found.append((bool(first), backend.jvp_of_vjp.refusal(problem, qkv, qkv) is None))
    return [
        {0: "no", 1: "some", 2: "yes"}[plain + modified]
        for plain, modified in zip(*found, strict=True)
    ]


def table() -> str:
    """Returns the lines between the markers. GPU backends answer as if there were a GPU."""
    backends = (
        HopperBackend(interpret=True),
        CudnnBackend(capability="10.0", version=OLDEST),
        PortableBackend(interpret=True),
        XlaBackend(),
    )
    names = [backend.name for backend in backends]
    columns = ["", "argument", "gradient", *names]
    lines = [f"| {' | '.join(columns)} |", f"| {' | '.join(['---'] * len(columns))} |"]
    for what, argument, gradient, example in ROWS:
        runs = [_runs(backend, what, example) for backend in backends]
        lines.append(f"| {' | '.join([what, argument, gradient, *runs])} |")
    for what, argument, dtype in PAGED:
        runs = [_paged(backend, dtype) for backend in backends]
        lines.append(f"| {' | '.join([what, argument, '', *runs])} |")
    for what, argument, example in DECODES:
        runs = [_decodes(backend, example) for backend in backends]
        lines.append(f"| {' | '.join([what, argument, '', *runs])} |")
    for row, runs in zip(BEYOND, zip(*map(_beyond, backends), strict=True), strict=True):
        lines.append(f"| {' | '.join([*row, '', *runs])} |")
    return "\n".join(lines) + "\n"


def coverage() -> str:
    """Returns the lines of what has run on which GPU."""
    columns = ["GPU", "kernels", "function", "dtypes", "head dims", "calls", "right", "day"]
    lines = [f"| {' | '.join(columns)} |", f"| {' | '.join(['---'] * len(columns))} |"]
    for path in sorted(RESULTS.glob("gpu_coverage*.json")):
        report = json.loads(path.read_text())
        parts = collections.defaultdict(list)
        for key, (_, _, verdict) in report["rows"].items():
            row = Row.parse(key)
            parts[row.target, row.function].append((row, verdict))
        for (target, function), found in sorted(parts.items()):
            rows = [row for row, _ in found]
            dtypes = sorted({row.dtype for row in rows} | {row.cache_dtype for row in rows})
            dims = sorted({row.head_dim for row in rows})
            right = sum(verdict == "right" for _, verdict in found)
            cells = [f"{len(dims)} from {dims[0]} to {dims[-1]}", len(rows), right, report["date"]]
            cells = [report["device"], target, function, ", ".join(dtypes), *cells]
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


# GPUs that the table of devices does not name, by compute capability.
OTHERS = {
    "8.6": ("A40", "RTX 30 series"),
    "8.9": ("L4", "RTX 40 series"),
    "9.0": ("GH200",),
    "10.0": ("GB200",),
    "10.3": ("B300", "GB300"),
    "12.0": ("RTX 50 series",),
    "12.1": ("GB10",),
}
# What "auto" runs, by the backends that it chooses from.
RUNS = {
    ("hopper", "portable"): "Hopper kernels",
    ("cudnn", "portable"): "cuDNN where it can, else portable kernels; float32 in `jnp`",
    ("portable",): "portable kernels; float32 in `jnp`",
}
ELSEWHERE = (
    ("CPU", "blockwise `jnp`", "yes, in every test"),
    ("TPU, AMD GPUs, older NVIDIA GPUs", "blockwise `jnp`, slower than a kernel", "no"),
)


def gpus() -> str:
    """Returns the lines that say, for each device, what runs and whether it has run there."""
    lines = [
        "| your device | what runs | has it run there? | TFLOP/s |",
        "| --- | --- | --- | --- |",
    ]
    here = _right_calls()
    order = {backends: i for i, backends in enumerate(RUNS)}
    kinds = collections.defaultdict(list)  # of GPUs with the same row
    for capability, kind in devices.GENERATIONS.items():
        kinds[kind.backends, kind.shared_memory].append(capability)
    for (backends, shared), capabilities in sorted(kinds.items(), key=lambda x: order[x[0][0]]):
        known = [x for x in devices.DEVICES.values() if x.capability in capabilities]
        names = [_short(x.kind) for x in known]
        names += [x for c in capabilities for x in OTHERS.get(c, ()) if x not in names]
        speeds = [f"{_short(x.kind)}: {x.tflops}" for x in known if x.tflops]
        ran = sorted({gpu for gpu, capability, _ in here if capability in capabilities})
        told = f"{', '.join(names)} ({', '.join(capabilities)})"
        if ran:
            calls = sum(here[key] for key in here if key[0] in ran and key[2] == backends[0])
            says = f"yes: {calls:,} calls are right on an {' and '.join(ran)}"
        else:
            calls = _with_tiles_of(here, shared)
            says = f"not yet: {calls:,} calls with its tile sizes are right on an H200"
        lines.append(f"| {told} | {RUNS[backends]} | {says} | {', '.join(speeds) or '-'} |")
    lines += [f"| {' | '.join(row)} | - |" for row in ELSEWHERE]
    return "\n".join(lines) + "\n"


def _short(kind: str) -> str:
    """Returns the name of a GPU without vendor, family and memory."""
    return re.sub(r"NVIDIA |GeForce |[- ](SXM\d-)?\S*GB\b.*", "", kind)


def _right_calls() -> collections.Counter[tuple[str, str, str]]:
    """Counts the calls that are right, by (GPU, its compute capability, kernels)."""
    found = collections.Counter()
    for path in sorted(RESULTS.glob("gpu_coverage*.json")):
        report = json.loads(path.read_text())
        for key, (_, _, verdict) in report["rows"].items():
            assert verdict == "right", f"{path.name}: {key} is {verdict}"
            found[_short(report["device"]), report["capability"], Row.parse(key).target] += 1
    return found


def _with_tiles_of(here: collections.Counter, shared: int) -> int:
    """Counts the calls of portable kernels with the tiles of an amount of shared memory."""
    names = {name for name in TARGETS if name.endswith(f"-{shared // devices.KB}")}
    return sum(calls for (gpu, _, name), calls in here.items() if gpu == "H200" and name in names)


# By name of a generated block: the lines between its markers, and the documents that have it.
BLOCKS = {
    "features": (table, (PAGE,)),
    "coverage": (coverage, (PAGE,)),
    "gpus": (gpus, (ROOT / "README.md", ROOT / "docs" / "index.md")),
}


def marked(name: str) -> re.Pattern[str]:
    """Returns the pattern of a generated block: its marker, its lines, the end."""
    return re.compile(rf"(<!-- table:{name} -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def on_page(name: str, page: Path) -> str:
    """Returns the lines of a generated block as a document has them."""
    (found,) = marked(name).findall(page.read_text())
    return found[1]


if __name__ == "__main__":
    for name, (make, pages) in BLOCKS.items():
        lines = make()
        for page in pages:
            text = marked(name).sub(lambda x, lines=lines: x[1] + lines + x[3], page.read_text())
            page.write_text(text)
