"""Counts the instructions of a tile in the backward's main loops, ours and FlashAttention-3's.

    python -m tests.compile_check.loops --out benchmarks/results/backward_instructions.json \\
        --fa3 libdew_flash_attn3.so --cuobjdump cuobjdump

It compiles the cells below for an H200, which need not be there. The library is that of the wheel
dew-flash-attn-cu13, and cuobjdump comes with nvidia-cuda-cuobjdump. The counts are of one warp and
one pass of the loop: a tile of as many query rows as `rows` says and 128 keys, of two warpgroups.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import flash_pallas as fp
from benchmarks import results

from .device import H200, PRINTED, Tools, compile_for, dump_to, find_tools
from .report import split

CELLS = {  # B, T, N, K, H and whether it is causal
    "4,4k,32,32,64 causal": (4, 4096, 32, 32, 64, True),
    "4,4k,16,16,128 causal": (4, 4096, 16, 16, 128, True),
    "2,8k,32,8,128 causal": (2, 8192, 32, 8, 128, True),
    "4,4k,16,16,128 full": (4, 4096, 16, 16, 128, False),
}
ROWS = {64: 128, 128: 64}  # queries of a step of ours, by head dim
KERNEL = "flash_pallas_backward_fused"
# FlashAttention-3's kernels: (text of the C++ name, ".*", text later in it; rows of a tile).
_FA3 = "C<{}>, cute::C<128>, cute::C<{}> >, cutlass::bfloat16_t, float, cutlass::arch::Sm90, {}"
_PLAIN = ", false, false, false, false, .*CollectiveEpilogueBwd<"
_GROUPED = ", false, false, false, false, .*CollectiveEpilogueBwdGQA<"
FA3 = {
    "4,4k,32,32,64 causal": (_FA3.format(128, 64, "true") + _PLAIN, 128),
    "4,4k,16,16,128 causal": (_FA3.format(64, 128, "true") + _PLAIN, 64),
    "2,8k,32,8,128 causal": (_FA3.format(64, 128, "true") + _GROUPED, 64),
    "4,4k,16,16,128 full": (_FA3.format(80, 128, "false") + _PLAIN, 80),
}
# What opcodes are for; those of the uniform datapath, which begin with U, make addresses.
GROUPS = {
    "matmuls": {"HGMMA", "WARPGROUP"},
    "exponentials": {"MUFU"},
    "arithmetic": {"FFMA", "FADD", "FMUL", "F2FP"},
    "masks and selects": {"FSEL", "ISETP", "SEL", "PLOP3", "FSETP", "USEL", "UISETP"},
    "moves and zeros": {"MOV", "CS2R", "IMAD"},
    "shared memory": {"LDS", "STS", "STSM", "LDSM", "SHFL"},
    "barriers and branches": {
        *("BAR", "SYNCS", "MEMBAR", "FENCE", "BRA", "BSSY", "BSYNC", "NOP", "WARPSYNC", "DEPBAR"),
    },
}
ADDRESSES, MATMULS = "addresses", "HGMMA"
FUSED = 24  # matmul instructions of a loop that has all five products, at least


class Instruction(NamedTuple):
    """An instruction of machine code; `opcode` without its modifiers."""

    address: int
    opcode: str
    target: str | None  # the label that a branch goes to


_LABEL = re.compile(r"^(\.L_x_\d+):")
_FUNCTION = re.compile(r"^\.text\.(\S+):")
_INSTRUCTION = re.compile(
    r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P[T0-9]+\s+)?([A-Z][A-Z0-9]*)[A-Z0-9_.]*([^/]*)"
)
_TARGET = re.compile(r"\((\.L_x_\d+)\)")


def functions(sass: str) -> dict[str, str]:
    """Splits disassembled code by function; code before the first one is left out."""
    found, name = collections.defaultdict(list), None
    for line in sass.splitlines():
        if begins := _FUNCTION.match(line):
            name = begins[1]
        elif name is not None:
            found[name].append(line)
    return {name: "\n".join(lines) for name, lines in found.items()}


def loops(code: str) -> list[collections.Counter[str]]:
    """Returns the opcodes of each innermost loop of a function that has all five matmuls, in order.

    A loop is what stands between a label and a branch back to it. Waits for a barrier also branch
    back, from behind the end of the kernel: their ranges have an EXIT.
    """
    instructions, labels, waiting = [], {}, []
    for line in code.splitlines():
        if label := _LABEL.match(line):
            waiting.append(label[1])
        elif match := _INSTRUCTION.search(line):
            labels |= dict.fromkeys(waiting, len(instructions))
            waiting = []
            target = _TARGET.search(match[3]) if match[2] == "BRA" else None
            instructions.append(Instruction(int(match[1], 16), match[2], target and target[1]))
    ends = {
        (labels[x.target], n)
        for n, x in enumerate(instructions)
        if x.target in labels and labels[x.target] <= n
    }
    count = lambda ends: collections.Counter(x.opcode for x in instructions[ends[0] : ends[1] + 1])
    found = {ends: count(ends) for ends in sorted(ends)}
    found = {ends: c for ends, c in found.items() if c[MATMULS] >= FUSED and not c["EXIT"]}
    has = lambda outer, inner: outer != inner and outer[0] <= inner[0] and inner[1] <= outer[1]
    return [c for ends, c in found.items() if not any(has(ends, other) for other in found)]


def grouped(opcodes: collections.Counter[str]) -> dict[str, int]:
    """Returns how many instructions there are for each purpose."""
    of = {opcode: name for name, group in GROUPS.items() for opcode in group}
    counts = dict.fromkeys((*GROUPS, ADDRESSES), 0)
    for opcode, number in opcodes.items():
        counts[of.get(opcode, ADDRESSES)] += number
    return counts


def rows_of(cell: str, who: str, rows: int, code: str) -> Iterator[dict[str, Any]]:
    """Yields a row of the results for each loop of a kernel."""
    for number, opcodes in enumerate(loops(code)):
        yield {
            "cell": cell,
            "kernel": who,
            "loop": number,
            "rows": rows,
            "instructions": opcodes.total(),
            "groups": grouped(opcodes),
            "opcodes": dict(sorted(opcodes.items())),
        }


def ours(tools: Tools) -> Iterator[dict[str, Any]]:
    """Compiles the gradient of each cell and yields the rows of its kernel."""
    for cell, (batch, length, heads, kv_heads, head_dim, causal) in CELLS.items():
        q, k = (
            jax.ShapeDtypeStruct((batch, length, n, head_dim), jnp.bfloat16)
            for n in (heads, kv_heads)
        )
        attend = lambda q, k, v, causal=causal: fp.flash_attention(
            q, k, v, causal=causal, backend="hopper"
        )
        loss = lambda *operands, attend=attend: attend(*operands).astype(jnp.float32).sum()
        with tempfile.TemporaryDirectory() as name, fp.target("H200"), dump_to(Path(name), tools):
            compile_for(H200, jax.grad(loss, (0, 1, 2)), q, k, k)
            kernels, _ = split(Path(name, PRINTED).read_text())
        (code,) = {x.sass for x in kernels if x.kernel == KERNEL}
        yield from rows_of(cell, "flash_pallas", ROWS[head_dim], code)


def theirs(library: Path, cuobjdump: str, tools: Tools) -> Iterator[dict[str, Any]]:
    """Disassembles FlashAttention-3's library and yields the rows of the cells' kernels."""
    assert tools.nvdisasm is not None, "nvidia-cuda-nvdisasm is not installed"
    with tempfile.TemporaryDirectory() as folder:
        run = lambda *command: (
            subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout
        )
        run(cuobjdump, "-xelf", "all", str(library.resolve()))
        cubins = sorted(Path(folder).glob("*.cubin"))
        code = [functions(run(str(tools.nvdisasm), "-c", str(path))) for path in cubins]
    every = dict(itertools.chain.from_iterable(x.items() for x in code))
    names = subprocess.run(
        ["c++filt"], input="\n".join(every), check=True, capture_output=True, text=True
    ).stdout.splitlines()
    for cell, (pattern, rows) in FA3.items():
        (name,) = {a for a, b in zip(every, names, strict=True) if _matches(pattern, b)}
        yield from rows_of(cell, "fa3", rows, every[name])


def _matches(pattern: str, name: str) -> bool:
    """Says whether a C++ name has the text of a pattern up to ".*", and the rest later on."""
    first, last = pattern.split(".*")
    return first in name and last in name.split(first, 1)[1]


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="results, a .json file")
    parser.add_argument("--fa3", type=Path, help="FlashAttention-3's library")
    parser.add_argument("--cuobjdump", default="cuobjdump", help="the program")
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    tools = find_tools()
    rows = list(ours(tools))
    if arguments.fa3 is not None:
        rows += theirs(arguments.fa3, arguments.cuobjdump, tools)
    about = {"target": H200.name, "ptxas": tools.version(), "fa3": "dew-flash-attn-cu13 0.3.6"}
    run = results.header("backward_instructions", {})
    about |= {name: run[name] for name in ("date", "commit", "versions")}
    arguments.out.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
