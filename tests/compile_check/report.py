"""Parses and judges what ptxas and Mosaic GPU say about a kernel."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import re
from pathlib import Path

from .device import Target

# ptxas' remarks on warpgroup instructions. C7519 tells of a harmless fence and is not listed.
SERIALISED = ("C7510", "C7512", "C7513", "C7518", "C7520")  # wgmma runs one after the other
REGISTERS_IGNORED = "C7504"  # setmaxnreg has no effect: every warpgroup gets 168 registers

MOST_REGISTERS = 255  # that a thread may have

_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_ARCHITECTURE = re.compile(r"Compiling entry function '\w+' for '(\w+)'")
_REGISTERS = re.compile(r"Used (\d+) registers")
_REMARK = re.compile(r"\((C\d{4})\)")
_SMEM = re.compile(r"smem_scratch_bytes=(\d+)")
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P[T0-9]+\s+)?([A-Z][A-Z0-9_.]*)([^/]*)")
_REGISTER = re.compile(r"\bR(\d+)\b")
_DEBUG_SECTIONS = re.compile(r"^\s*\.section\s+\.debug", re.MULTILINE)
_DEBUG_LINE = re.compile(r"\s*(\.loc|\.file|\$L__(tmp|func))")
_LABEL = re.compile(r"^(\.L_x_\d+):|/\*([0-9a-f]{4,})\*/", re.MULTILINE)

# Opcodes that say little without their first modifier (MUFU.EX2, WARPGROUP.DEPBAR).
_QUALIFIED = ("MUFU", "WARPGROUP")


@dataclasses.dataclass(frozen=True)
class Report:
    """Figures of one compiled kernel.

    Attributes:
        kernel: its name.
        architecture: architecture that ptxas compiled for, such as "sm_90a".
        launch_registers: registers per thread at launch; warpgroups trade them afterwards.
        stack, spill_stores, spill_loads: bytes per thread.
        remarks: codes of ptxas' remarks (C7512, ...), each once.
        smem: bytes of shared memory, without barriers.
        highest_register: highest register number that an instruction names, or None without SASS.
        instructions: count of each opcode, or None without SASS.
        code: digest of the machine code, or None without SASS.
        ptx: digest of the PTX that ptxas was given, without line numbers.
    """

    kernel: str
    architecture: str
    launch_registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    remarks: tuple[str, ...]
    smem: int
    highest_register: int | None = None
    instructions: dict[str, int] | None = None
    code: str | None = None
    ptx: str | None = None

    def faults(
        self, target: Target, allowed_spills: int, most_registers: int = MOST_REGISTERS
    ) -> list[str]:
        """Returns the reasons why this kernel must not be shipped; empty if it may.

        Args:
            target: GPU that it should have been compiled for.
            allowed_spills: bytes of spill stores per thread that are known and accepted.
            most_registers: limit at launch; with more, fewer CTAs fit on an SM than planned.
        """
        faults = [f"wgmma serialised ({code})" for code in self.remarks if code in SERIALISED]
        if REGISTERS_IGNORED in self.remarks:
            faults.append(f"setmaxnreg ignored ({REGISTERS_IGNORED})")
        if self.spill_stores > allowed_spills:
            faults.append(f"spills {self.spill_stores} bytes, {allowed_spills} allowed")
        if self.launch_registers > most_registers:
            faults.append(f"{self.launch_registers} registers, {most_registers} allowed")
        if self.smem > target.smem:
            faults.append(f"{self.smem} bytes of shared memory, {target.smem} exist")
        if self.architecture != target.architecture:
            faults.append(f"compiled for {self.architecture}, not {target.architecture}")
        return faults


def _one(pattern: re.Pattern, text: str, source: Path) -> tuple[str, ...]:
    found = pattern.search(text)
    if found is None:
        raise ValueError(f"{source} does not say {pattern.pattern!r}: ptxas changed its words?")
    return found.groups()


def _kernel(path: Path) -> str:
    """Returns the name of a kernel from its file name, which ends with a number."""
    return re.sub(r"_\d+$", "", path.name.split(".")[0])


def _sass(path: Path) -> tuple[int | None, dict[str, int] | None]:
    if not path.exists() or not path.read_text().strip():
        return None, None
    counts = collections.Counter()
    highest = 0
    for opcode, operands in _INSTRUCTION.findall(path.read_text()):
        name, *modifiers = opcode.split(".")
        counts[".".join([name, *modifiers[: name in _QUALIFIED]])] += 1
        highest = max([highest, *(int(r) for r in _REGISTER.findall(operands))])
    return highest, dict(sorted(counts.items()))


def _digest_of_ptx(path: Path) -> str | None:
    """Returns a digest of a kernel's PTX without debug information, whose line numbers move."""
    if not path.exists():
        return None
    code = _DEBUG_SECTIONS.split(path.read_text(), maxsplit=1)[0]
    lines = [line for line in code.splitlines() if not _DEBUG_LINE.match(line)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _digest(path: Path) -> str | None:
    """Returns a digest of a kernel's instructions, operands and control words.

    Labels count as the addresses that they stand at: debug information adds some of its own.
    """
    if not path.exists() or not path.read_text().strip():
        return None
    text = path.read_text()
    addresses, waiting = {}, []
    for label, address in _LABEL.findall(text):
        if label:
            waiting.append(label)
            continue
        addresses |= dict.fromkeys(waiting, address)
        waiting.clear()
    lines = [line for line in text.splitlines() if "/*" in line]
    named = re.sub(r"\.L_x_\d+", lambda x: addresses.get(x[0], "end"), "\n".join(lines))
    return hashlib.sha256(named.encode()).hexdigest()[:16]


def read(ptxas: Path, resources: Path) -> Report:
    """Reads the report of the kernel whose ptxas output and shared memory are in these two files.

    Raises:
        ValueError: a file lacks a figure that is printed for every kernel.
    """
    text = ptxas.read_text()
    (architecture,) = _one(_ARCHITECTURE, text, ptxas)
    (registers,) = map(int, _one(_REGISTERS, text, ptxas))
    stack, stores, loads = map(int, _one(_SPILLS, text, ptxas))
    (smem,) = map(int, _one(_SMEM, resources.read_text(), resources))
    sass = ptxas.with_suffix(".sass_ctrl")
    highest, instructions = _sass(sass)
    return Report(
        kernel=_kernel(ptxas),
        architecture=architecture,
        launch_registers=registers,
        stack=stack,
        spill_stores=stores,
        spill_loads=loads,
        remarks=tuple(dict.fromkeys(_REMARK.findall(text))),
        smem=smem,
        highest_register=highest,
        instructions=instructions,
        code=_digest(sass),
        ptx=_digest_of_ptx(ptxas.with_suffix(".ptx")),
    )


def take(folder: Path) -> list[Report]:
    """Reads the reports of all kernels in a dump folder and empties it (40 MB per kernel).

    Mosaic GPU numbers kernels as they are lowered and, in other files, as they are compiled; with
    jax 0.12 the two orders differ. For a kernel that it has compiled before, it writes the first
    kind of file only.

    Raises:
        ValueError: a file lacks a figure that is printed for every kernel.
        FileNotFoundError: Mosaic GPU's own file is missing.
    """
    numbered = lambda suffix: sorted(folder.glob("*" + suffix), key=lambda path: path.name)
    lowered = numbered(".resources.txt")
    reports = []
    for path in numbered(".ptxas"):
        mine = [x for x in lowered if _kernel(x) == _kernel(path)]
        if not mine:
            raise FileNotFoundError(f"{path} has no .resources.txt beside it")
        lowered.remove(mine[0])
        reports.append(read(path, mine[0]))
    for path in folder.iterdir():
        path.unlink()
    return reports
