"""Puts figures of the results into the sentences of the documents.

    python -m benchmarks.figures

A page writes `<!-- figure:NAME -->643<!-- end -->`; this command replaces what stands between the
two comments. tests/test_readme.py fails if a page is not current, or has no place for a figure.
"""

from __future__ import annotations

import functools
import itertools
import json
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from . import markdown
from . import results as results_file

ROOT = pathlib.Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGES = ("README.md", *(str(x.relative_to(ROOT)) for x in sorted(ROOT.glob("docs/**/*.md"))))
MARKED = re.compile(r"(<!-- figure:(\S+) -->)(.*?)(<!-- end -->)", re.DOTALL)

Figures = Iterator[tuple[str, str]]  # (name, text)
Row = dict[str, Any]

OURS = "flash_pallas"
OPERATIONS = {"forward": 4, "backward": 10}  # floating-point operations for a pair and a column
LEVEL = (0.97, 1.03)  # ratios that two readings of one cell do not tell from 1


@functools.cache
def rows_of(name: str) -> list[Row]:
    """Returns the rows of a results file."""
    return json.loads((RESULTS / f"{name}.json").read_text())["rows"]


def span(ratios: Iterable[float], digits: int = 2) -> str:
    """Returns "lowest to highest", or one number if both read the same."""
    ratios = list(ratios)
    low, high = f"{min(ratios):.{digits}f}", f"{max(ratios):.{digits}f}"
    return low if low == high else f"{low} to {high}"


def cell(row: Row) -> tuple[str, str, str]:
    """Returns (B,T,N,K,H, mask, pass) of a row."""
    sizes = (row[n] for n in ("batch", "q_len", "q_heads", "kv_heads", "head_dim"))
    return ",".join(map(str, sizes)), "causal" if row["causal"] else "full", row["direction"]


def _speeds() -> Figures:
    """Yields speeds in TFLOP/s: the table of README, and of one cell on several GPUs."""
    providers = {
        OURS: OURS,
        "torch_cudnn": "cuDNN (PyTorch)",
        "jax_cudnn": "cuDNN (jax.nn)",
        "tokamax": "Tokamax",
    }
    tflops = {(*cell(row), row["provider"]): row["tflops"] for row in rows_of("h200")}
    shapes = "4,4096,16,16,128", "4,4096,32,32,64", "2,8192,32,8,128"
    body = []
    for of_cell in itertools.product(shapes, ("causal",), OPERATIONS):
        body.append([*of_cell, *(f"{tflops[*of_cell, name]:.0f}" for name in providers)])
    head = ["B,T,N,K,H", "mask", "pass", *providers.values()]
    yield "speeds", f"\n{markdown.grid(head, body)}\n"
    wanted = ("4,4096,16,16,128", "causal", "forward")
    for name in ("h100", "h200", "h200_fa4"):
        (found,) = (r for r in rows_of(name) if r["provider"] == OURS and cell(r) == wanted)
        yield f"speed.{name}", f"{found['tflops']:.0f}"


def _beside_cudnn() -> Figures:
    """Yields how many times as fast as the faster of the two cuDNN the kernels are."""
    least = lambda row: min(row["relative"].values())
    of_file = lambda name: [row for row in rows_of(name) if row["provider"] == OURS]
    for direction in OPERATIONS:
        of_pass = [row for row in of_file("h100") if row["direction"] == direction]
        yield f"h100.{direction}", span(map(least, of_pass))
    yield "h200_jax012", span(map(least, of_file("h200_jax012")))


def _jax_0_12() -> Figures:
    """Yields the speed with jax 0.12 relative to that with 0.11.2.

    Each run had a GPU of its own, so the ratios to PyTorch's cuDNN are compared.
    """

    def ratios(name: str) -> dict[tuple, float]:
        key = lambda row: tuple(row[x] for x in results_file.ROW_FIELDS[:7])
        ours = [row for row in rows_of(name) if row["provider"] == OURS]
        return {key(row): row["ratio_to_torch_cudnn"] for row in ours}

    old, new = ratios("h200_jax011"), ratios("h200_jax012")
    for direction in OPERATIONS:
        found = [new[key] / old[key] for key in old if key[-1] == direction]
        yield f"jax012.{direction}", span(found)
    yield "jax012", span(new[key] / old[key] for key in old)
    yield "jax012.pair", span(row["time_ratio"]["0.12.0"] for row in rows_of("versions_jax"))
    backward = [
        r["time_ratio"] for r in rows_of("without_producer") if r["direction"] == "backward"
    ]
    yield "without_producer", span(times["nplate3"] / times["np"] for times in backward)


class Reading(NamedTuple):
    """Call that a speed relative to another FlashAttention is of."""

    file: str
    batch: int
    length: int
    grouped: bool
    head_dim: int
    causal: bool
    direction: str


# The results files that have a peer next to ours.
FILES = {"fa3": ("fa3",), "fa4": ("fa4", "h200_fa4")}


def readings(peer: str) -> list[tuple[Reading, float]]:
    """Returns the speeds relative to a peer of all cells, some of which are in two files."""
    found = []
    for file in FILES[peer]:
        for row in rows_of(file):
            if row["provider"] == OURS:
                sizes = row["batch"], row["q_len"], row["q_heads"] > row["kv_heads"]
                of = Reading(file, *sizes, row["head_dim"], row["causal"], row["direction"])
                found.append((of, row["relative"][peer]))
    return found


def read_twice() -> list[list[float]]:
    """Returns both ratios to FlashAttention-4 of each cell that is in both tables."""
    cells: dict[tuple, list[float]] = {}
    for of, ratio in readings("fa4"):
        cells.setdefault(of[1:], []).append(ratio)
    return [found for found in cells.values() if len(found) == 2]


def _counted(peer: str, direction: str, most_head_dim: int) -> str:
    """Says of how many readings up to a head dim ours is ahead, level and behind."""
    cells = [(of.head_dim, x) for of, x in readings(peer) if of.direction == direction]
    ratios = [x for head_dim, x in cells if head_dim <= most_head_dim]
    low, high = LEVEL
    ahead, behind = sum(x > high for x in ratios), sum(x < low for x in ratios)
    level = len(ratios) - ahead - behind
    if not behind:
        at = " and ".join(str(d) for d in sorted({h for h, x in cells if x <= high}))
        return (
            f"ahead in {ahead} of {len(ratios)} readings, by up to {max(ratios):.2f} times; "
            f"level in the other {level}, at head dim {at}"
        )
    return (
        f"level in {level} of {len(ratios)} readings, ahead in {ahead} (up to {max(ratios):.2f} "
        f"times), behind in {behind} (down to {min(ratios):.2f})"
    )


def _beside_flash_attention_4() -> Figures:
    """Yields the speed relative to FlashAttention-4, by what decides it."""

    def of_cells(direction: str, wanted: Callable[[Reading], bool]) -> str:
        last = dict(readings("fa4"))  # of a cell that one file has twice, tables have the last
        return span(x for of, x in last.items() if of.direction == direction and wanted(of))

    backward = functools.partial(of_cells, "backward")
    to_192 = lambda of: of.head_dim <= 192
    yield "fa4.forward.readings", _counted("fa4", "forward", 256)
    yield "fa4.backward.readings", _counted("fa4", "backward", 192)
    yield "fa4.forward", of_cells("forward", lambda of: True)
    for head_dim in (64, 96, 128, 192, 256):
        at_head_dim = lambda of, head_dim=head_dim: of.head_dim == head_dim
        yield f"fa4.forward.{head_dim}", of_cells("forward", at_head_dim)
    yield "fa4.backward.256", backward(lambda of: of.head_dim == 256)
    yield "fa4.causal", backward(lambda of: to_192(of) and of.causal)
    yield "fa4.full", backward(lambda of: to_192(of) and not of.causal)
    for length in (1024, 2048):
        at_length = lambda of, length=length: to_192(of) and of.causal and of.length == length
        yield f"fa4.causal.{markdown.thousands(length)}", backward(at_length)
    yield "fa4.causal.grouped", backward(lambda of: to_192(of) and of.causal and of.grouped)
    alone = lambda of: to_192(of) and of.causal and of.length > 2048 and not of.grouped
    yield "fa4.causal.longer", backward(alone)
    yield "fa4.16k", backward(lambda of: (of.length, of.head_dim) == (16384, 128))
    twice = read_twice()
    yield "fa4.twice", str(len(twice))
    yield "fa4.apart", f"{max(abs(x - y) for x, y in twice):.2f}"
    yield "fa4.level", "{} to {}".format(*LEVEL)


def _beside_flash_attention_3() -> Figures:
    """Yields our speed relative to FlashAttention-3, and with modifiers that of its to ours."""
    yield "fa3.forward.readings", _counted("fa3", "forward", 256)
    yield "fa3.backward.readings", _counted("fa3", "backward", 192)
    at_256 = lambda of: (of.direction, of.head_dim) == ("backward", 256)
    yield "fa3.backward.256", span(x for of, x in readings("fa3") if at_256(of))
    rows = rows_of("features_fa3")
    for direction in OPERATIONS:
        documents, others = [], []
        of_pass = [row for row in rows if row["direction"] == direction]
        for ours, theirs in zip(of_pass[::2], of_pass[1::2], strict=True):
            assert theirs["name"] == "fa3" and ours["shape"] == theirs["shape"]
            (documents if "documents" in ours["name"] else others).append(theirs["speed"])
        yield f"fa3.documents.{direction}", " and ".join(f"{x:.2f}" for x in sorted(documents))
        yield f"fa3.modifiers.{direction}", span(others)


def _features() -> Figures:
    """Yields speeds of packed documents and of block masks."""
    batch, varlen = "causal, 16 sequences of one length", "causal, varlen of 16 documents"
    packed = [row for row in rows_of("features_positions") if row["group"] == "packed"]
    for direction, length in itertools.product(OPERATIONS, (32768, 131072)):
        call = f"1,{length},16,16,128", direction
        of = {row["name"]: row for row in packed if (row["shape"], row["direction"]) == call}
        pairs = of[varlen]["visible"] / of[batch]["visible"]
        speed = of[varlen]["speed"] / of[batch]["speed"] * pairs
        yield f"documents.{direction}.{markdown.thousands(length)}", f"{speed:.2f}"
    for block, direction in itertools.product((64, 128), OPERATIONS):
        wanted = f"block mask, 64 blocks of {block}", direction
        rows = rows_of("features_blocks")
        row = next(r for r in rows if (r["name"], r["direction"]) == wanted)
        _, length, heads, _, width = map(int, row["shape"].split(","))
        pairs = length**2 * row["visible"] * heads
        speed = OPERATIONS[direction] * pairs * width / row["ms"] / 1e9
        yield f"blocks.{block}.{direction}", f"{speed:.0f}"


def _wide() -> Figures:
    """Yields the speed above head dim 256, relative to memory-efficient attention."""
    told: dict[str, list[float]] = {"forward": [], "backward": []}
    for row in rows_of("wide"):
        if row["provider"] == OURS:
            told[row["direction"]].append(row["relative"]["torch_efficient"])
    *backward, single = told["backward"]  # the last shape has one head
    yield "wide.forward", span(told["forward"], 1)
    yield "wide.backward", span(backward, 1)
    yield "wide.single", f"{single:.1f}"


def _client() -> Figures:
    """Yields tokens per second of a model that trains with MaxText."""
    speeds = {row["provider"]: row["tokens_per_second"] for row in rows_of("client")}
    ours, theirs = speeds[OURS], speeds["cudnn_flash_jax"]
    for name, speed in (("ours", ours), ("theirs", theirs)):
        yield f"client.{name}", f"{round(speed, -2):,.0f}"
    yield "client.more", f"{100 * (ours / theirs - 1):.0f} %"


# Rows of the tables of docs/first-call.md: names there, by contestant; and how many digits.
FIRST_CALLS = {
    "first_call": (
        1,
        {
            "flash_pallas, all ahead": "flash_pallas",
            "flash_pallas, none ahead": "flash_pallas, nothing compiled ahead",
            "flash_pallas, cached": "flash_pallas, in JAX's persistent cache",
            "jax_cudnn": "`jax.nn` on cuDNN, which brings its kernels compiled",
        },
    ),
    "first_call_exported": (
        2,
        {
            "flash_pallas, exported": "flash_pallas, exported",
            "jax_cudnn, exported": "`jax.nn` on cuDNN, exported",
            "jax_cudnn, cached": "`jax.nn` on cuDNN",
        },
    ),
}


def _first_calls() -> Figures:
    """Yields tables of the seconds of first calls."""
    work = ("forward", "gradient", "training step")
    for file, (digits, names) in FIRST_CALLS.items():
        rows = rows_of(file)
        seconds = {(row["provider"], row["work"]): row["first_s"] for row in rows}
        body = []
        for provider, name in names.items():
            told = [f"{seconds[provider, x]:.{digits}f}" for x in work]
            if provider == "flash_pallas, all ahead":  # a forward's one kernel is not ahead of any
                told[0] = "-"
            body.append([name, *told])
        table = markdown.grid(["s", *work], body)
        yield file, f"\n{table}\n"


# Which tiles a loop is for, where a kernel has several that calls like these run.
LOOPS = {("fa3", 0): ", cut by the mask", ("fa3", 1): ", others"}


def _instructions() -> Figures:
    """Yields the table of instructions of a tile in the backward's main loops."""
    rows = [x for x in rows_of("backward_instructions") if x["kernel"] == "fa3" or x["loop"] == 0]
    several = {x["cell"] for x in rows if x["loop"]}
    body = []
    for row in sorted(rows, key=lambda x: x["cell"]):
        ours = row["kernel"] == OURS
        tiles = "" if ours or row["cell"] not in several else LOOPS[row["kernel"], row["loop"]]
        name = "`flash_pallas`" if ours else f"FlashAttention-3{tiles}"
        counts = (row["rows"], row["instructions"], *row["groups"].values())
        body.append([row["cell"], name, *map(str, counts)])
    head = ["B,T,N,K,H", "tiles of", "queries", "instructions", *rows[0]["groups"]]
    yield "backward_instructions", f"\n{markdown.grid(head, body)}\n"
    found = {(x["cell"], x["kernel"], x["loop"]): x for x in rows}
    count = lambda key, opcode: found[key]["opcodes"].get(opcode, 0)
    at_64, at_128, grouped = "4,4k,32,32,64 causal", "4,4k,16,16,128 causal", "2,8k,32,8,128 causal"
    more = lambda a, b, opcode: str(count(a, opcode) - count(b, opcode))
    ours, fa3 = (at_128, OURS, 0), (at_128, "fa3", 0)
    yield "instructions.selects", more(ours, fa3, "FSEL")
    yield "instructions.compares", more(fa3, ours, "ISETP")
    yield "instructions.compares.64", more((at_64, OURS, 0), (at_64, "fa3", 1), "ISETP")
    yield "instructions.shuffles.64", str(count((at_64, "fa3", 1), "SHFL"))
    all_of = lambda key: found[key]["instructions"]
    yield "instructions.division", str(all_of((grouped, OURS, 0)) - all_of(ours))


def _profile() -> Figures:
    """Yields the table of what Nsight Compute says of the backward's main kernels."""
    rows = rows_of("backward_profile")
    waits = {
        "short_sb": "shared memory, exponentials",
        "long_sb": "mbarriers, fences",
        "barrier": "barriers, matmuls",
        "wait": "the last instruction",
    }
    names = {OURS: "`flash_pallas`", "fa3": "FlashAttention-3"}
    metrics = [x for x in rows[0] if x not in ("cell", "kernel", "loop")]
    body = [
        [
            *(row["cell"], names[row["kernel"]]),
            *(f"{row[name]:.4g}" for name in metrics),
            *(f"{row['loop']['waits, % of samples'].get(name, 0.0):.0f}" for name in waits),
        ]
        for row in rows
    ]
    head = ["B,T,N,K,H", "kernel", *metrics, *(f"% of samples: {said}" for said in waits.values())]
    yield "backward_profile", f"\n{markdown.grid(head, body)}\n"


def _worth_of_instructions() -> Figures:
    """Yields the time of trials of the backward with fewer instructions, over that without."""

    def times(file: str, form: str) -> dict[str, float]:
        rows = [row for row in rows_of(file) if row["direction"] == "backward"]
        return {row["cell"]: row["time_ratio"][form] for row in rows if form in row["time_ratio"]}

    kept, tried = (
        times("versions_backward", OURS),
        times("versions_backward_trial", "flash_pallas_b64"),
    )
    of = lambda found, head_dim, *lengths: span(
        found[f"{length},{2048 // head_dim},{2048 // head_dim},{head_dim} causal"]
        for length in lengths
    )
    yield "instructions.branch.128", of(kept, 128, "16,1024", "8,2048", "4,4096", "1,16384")
    yield "instructions.branch.64", of(tried, 64, "16,1024", "4,4096", "1,16384")
    groups = [kept[f"{shape} causal"] for shape in ("2,8192,32,8,128", "1,8192,64,8,128")]
    yield "instructions.groups", span(groups)


FAMILIES = (
    _speeds,
    _beside_cudnn,
    _jax_0_12,
    _beside_flash_attention_4,
    _beside_flash_attention_3,
    _features,
    _wide,
    _client,
    _first_calls,
    _instructions,
    _profile,
    _worth_of_instructions,
)


def figures() -> dict[str, str]:
    """Returns the text of every figure by name."""
    found: dict[str, str] = {}
    for family in FAMILIES:
        for name, text in family():
            if name in found:
                raise ValueError(f"two figures are named {name!r}")
            found[name] = text
    return found


def current(page: str, texts: dict[str, str]) -> str:
    """Returns a page with its figures replaced; one that only breaks across lines is left.

    Raises:
        ValueError: the page asks for a figure that does not exist.
    """

    def text(match: re.Match) -> str:
        opening, name, old, closing = match.groups()
        if name not in texts:
            raise ValueError(f"no figure is named {name!r}; benchmarks/figures.py has them")
        same = old.split() == texts[name].split()
        return f"{opening}{old if same else texts[name]}{closing}"

    return MARKED.sub(text, page)


def main() -> None:
    """Rewrites the pages that are not current, and names them."""
    texts = figures()
    for page in PAGES:
        old = (ROOT / page).read_text()
        if (new := current(old, texts)) != old:
            (ROOT / page).write_text(new)
            print(page)


if __name__ == "__main__":
    main()
