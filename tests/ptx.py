"""Simulates the PTX that a portable kernel writes: all threads of a warpgroup at once, in numpy.

The interpreter runs the plain meaning of each inlined piece, so a wrong address shows only on a
GPU. Here the pieces themselves run: `Machine` stands for the modules of MLIR that they are written
with, a value is one number per thread, and each instruction does what the PTX ISA (9.0, sections on
ldmatrix, mma.m16n8k16 and cp.async) says, at real addresses. A read of what does not exist, or at
an address that is not aligned, fails.
"""

from __future__ import annotations

import contextlib
import re
import types
from typing import Any

import jax.numpy as jnp
import numpy as np

from flash_pallas.backends.gpu.ptx import inline
from flash_pallas.backends.gpu.ptx.inline import WGMMA

THREADS, WARP = 128, 32
SHARED, GLOBAL = 1 << 10, 1 << 40  # where the first array lies
BFLOAT16 = np.dtype(jnp.bfloat16)


class Memory:
    """Arrays at addresses, separated by gaps that belong to none."""

    def __init__(self, start: int) -> None:
        self.end, self.arrays = start, []

    def add(self, array: np.ndarray) -> int:
        """Adds a contiguous array; returns the address at which `read` and `write` reach it."""
        address = self.end
        self.arrays.append((address, array.reshape(-1).view(np.uint8)))
        self.end = address + -(-array.nbytes // 1024) * 1024 + 4096
        return address

    def _at(self, address: int, size: int) -> np.ndarray:
        if address % min(size, 16):
            raise AssertionError(f"{size} bytes at {address:#x}: not aligned")
        for start, data in self.arrays:
            if start <= address and address + size <= start + data.size:
                return data[address - start : address - start + size]
        raise AssertionError(f"{size} bytes at {address:#x}: there is no array")

    def read(self, address, size: int) -> np.ndarray:
        """Returns `size` bytes at an aligned address."""
        return self._at(int(address), size)

    def write(self, address, data: np.ndarray) -> None:
        """Writes bytes at an aligned address."""
        self._at(int(address), data.size)[:] = data


class _Type:
    """Type of a memref: shape, strides and element type."""

    def __init__(self, array: np.ndarray, kind) -> None:
        self.shape, self.element_type = list(array.shape), kind
        self.strides = [stride // array.itemsize for stride in array.strides]

    def get_strides_and_offset(self):
        return self.strides, 0


class _Ref:
    """A memref: a view of an array that lies in one of the memories."""

    def __init__(self, view: np.ndarray, base: np.ndarray, address: int, kind) -> None:
        self.type = _Type(view, kind)
        offset = view.__array_interface__["data"][0] - base.__array_interface__["data"][0]
        self.address = address + offset


class Layout:
    """WGMMA's register layout; its own thread_idxs would emit code for a thread's first element."""

    tiling = WGMMA.to_mgpu().tiling
    registers_shape = staticmethod(WGMMA.to_mgpu().registers_shape)

    @staticmethod
    def thread_idxs(shape):
        """Yields (row, column) of each thread's first element only.

        Lane l of warp w has row 16 w + l / 4, column 2 (l % 4).
        """
        lane, warp = np.arange(THREADS) % WARP, np.arange(THREADS) // WARP
        yield 16 * warp + lane // 4, 2 * (lane % 4)


class Tile:
    """A FragmentedArray; each register is [threads, 2]."""

    def __init__(self, registers: np.ndarray, shape, kind=None) -> None:
        self.registers, self.shape, self.layout, self.mlir_dtype = registers, shape, Layout(), kind

    @classmethod
    def of(cls, values: np.ndarray) -> Tile:
        """Distributes a tile over the registers that hold it."""
        found = np.empty(Layout.registers_shape(values.shape), dtype=object)
        rows, columns = next(Layout.thread_idxs(values.shape))
        for index, row, column in inline.coordinates(values.shape, Layout):
            found[index] = np.stack(
                [values[rows + row, columns + column + e] for e in (0, 1)], axis=1
            )
        return cls(found, values.shape)

    def values(self, dtype=np.float32) -> np.ndarray:
        """Gathers the tile from its registers."""
        found = np.empty(self.shape, dtype)
        rows, columns = next(Layout.thread_idxs(self.shape))
        for index, row, column in inline.coordinates(self.shape, Layout):
            for e in (0, 1):
                found[rows + row, columns + column + e] = self.registers[index][:, e]
        return found


# Of the last two operands, for what is told of the others.
_GUARDED = re.compile(r"\{ \.reg \.pred p; setp\.lt\.s32 p, \$(\d), \$(\d); @p (.*) \}")


def _unsigned(x) -> np.ndarray:
    return np.ascontiguousarray(np.broadcast_to(x, (THREADS,)))


class Machine:
    """A simulated CTA of 128 threads; its attributes replace the modules that inlined code uses."""

    def __init__(self) -> None:
        self.shared, self.device, self.active = Memory(SHARED), Memory(GLOBAL), [True]
        self.pending: dict[int, np.ndarray] = {}  # copies in flight, by address
        self.arith = types.SimpleNamespace(
            addi=np.add, addf=np.add, subi=np.subtract, muli=np.multiply, divui=np.floor_divide,
            remui=np.remainder, andi=np.bitwise_and, ori=np.bitwise_or, select=np.where,
            minsi=np.minimum, minui=np.minimum, cmpi=lambda kind, x, y: kind(x, y),
            extsi=lambda kind, x: x, extui=lambda kind, x: x, index_cast=lambda kind, x: x,
            constant=lambda kind, x: np.int64(x), xori=np.bitwise_xor,
            CmpIPredicate=types.SimpleNamespace(
                slt=np.less, ult=np.less, ne=np.not_equal, eq=np.equal
            ),
        )  # fmt: skip
        kind = lambda name: types.SimpleNamespace(get=lambda *_: name)
        self.ir = types.SimpleNamespace(
            IntegerType=types.SimpleNamespace(get_signless=lambda bits: f"i{bits}"),
            Type=types.SimpleNamespace(parse=lambda text: text),
            F32Type=kind("f32"), BF16Type=_BFloat16, InsertionPoint=self._only,
            VectorType=types.SimpleNamespace(get=lambda shape, of: (shape[0], of)),
        )  # fmt: skip
        self.scf = types.SimpleNamespace(
            IfOp=lambda condition: types.SimpleNamespace(then_block=condition),
            yield_=lambda values: None,
        )
        self.llvm = types.SimpleNamespace(
            ptrtoint=lambda kind, x: np.int64(x), inline_asm=self._run, bitcast=_bits,
            extractvalue=lambda kind, found, at: found[at[0]], load=self._load,
            store=self._write,
        )  # fmt: skip
        utils = types.SimpleNamespace(
            thread_idx=lambda: np.arange(THREADS, dtype=np.int64),
            memref_ptr=lambda ref: ref.address,
            warpgroup_barrier=lambda: None,
            bitwidth=lambda kind: 8 * kind.itemsize,
            getelementptr=lambda base, at, kind: base + at[0] * _dtype(kind).itemsize,
        )
        self.mgpu = types.SimpleNamespace(utils=utils)
        self.vector = types.SimpleNamespace(
            broadcast=lambda kind, x: x[:, None],
            from_elements=lambda kind, values: np.stack(values, axis=1),
        )

    def install(self, monkeypatch, *modules: Any) -> None:
        """Puts this machine in the place of MLIR in these modules."""
        plain = {
            "i32_constant": np.int64,
            "splat": lambda x: x,
            "linear": lambda base, *terms: base + sum(x * factor for x, factor in terms),
            "opaque": lambda x: x,
            "origin": lambda shape, layout: next(iter(layout.thread_idxs(shape))),
            "at": lambda register, e: register[:, e],
            "pair": lambda *values: np.stack(values, axis=1),
            "fragmented": lambda found, layout, *_: Tile(found, self.shape),
        }
        own = {
            name: getattr(self, name) for name in ("arith", "ir", "scf", "llvm", "mgpu", "vector")
        }
        for module in modules:
            for name, value in (own | plain).items():
                if hasattr(module, name):
                    monkeypatch.setattr(module, name, value)

    shape: tuple[int, int] = (0, 0)  # of what `fragmented` makes

    def array(self, values: np.ndarray, view=None, *, shared: bool = False) -> _Ref:
        """Stores values in memory; returns a ref of them or of view(values). Writes change them."""
        address = (self.shared if shared else self.device).add(values)
        kind = _BFloat16() if values.dtype == BFLOAT16 else values.dtype
        return _Ref(values if view is None else view(values), values, address, kind)

    # --- what instructions do --------------------------------------------------------------------

    @contextlib.contextmanager
    def _only(self, condition):
        self.active.append(np.logical_and(self.active[-1], condition))
        yield
        self.active.pop()

    def _threads(self):
        return np.flatnonzero(np.broadcast_to(self.active[-1], (THREADS,)))

    def _run(self, kind, operands, code: str, constraints: str, has_side_effects: bool = False):
        del constraints, has_side_effects
        operands = [_unsigned(x) for x in operands]
        if found := _GUARDED.fullmatch(code):  # by a comparison of two operands
            x, y = (operands.pop(int(found[n])) for n in (2, 1))
            with self._only(y < x):
                return self._run(kind, operands, found[3], "", True)
        name = "" if code.startswith("{") else name_of(code)
        if code.startswith("{ .reg .b32 ") or name in _OPERATIONS:
            return _computed(code, operands)
        offsets = {int(n): int(add or 0) for n, add in re.findall(r"\[\$(\d+)\+?(-?\d+)?\]", code)}
        for run, start in (
            (self._copy, "cp.async.cg"),
            (self._arrive, "cp.async.wait"),
            (self._commit, "cp.async.commit"),
            (self._matrices, "ldmatrix"),
            (self._multiply, "mma.sync"),
            (self._store, "st."),
            (self._read, "ld.shared"),
            (self._read_floats, "ld.global"),
            (self._add, "red.global.add"),
        ):
            if name.startswith(start):
                return run(code, operands, offsets)
        raise AssertionError(f"an instruction that nobody told of: {code}")

    def _copy(self, code, operands, offsets):
        to, of, *size = operands
        (size,) = size or (np.full(THREADS, 16),)
        for t in self._threads():
            data = np.zeros(16, np.uint8)
            data[: size[t]] = self.device.read(of[t] + offsets[1], 16)[: size[t]] if size[t] else 0
            place = int(to[t] + offsets[0])
            # Which of two copies arrives last is open, so one of them is wrong.
            assert place not in self.pending, f"two copies write the 16 bytes at {place:#x}"
            self.pending[place] = data.copy()

    def _commit(self, code, operands, offsets):
        return None

    def _arrive(self, code, operands, offsets):
        for address, data in self.pending.items():
            self.shared.write(address, data)
        self.pending.clear()

    def _matrices(self, code, operands, offsets):
        """Executes ldmatrix.x4: lane 8 j + i has the address of row i of matrix j."""
        (address,), (offset,) = operands, offsets.values()
        found = np.empty((4, THREADS, 2), np.uint16)
        lane = np.arange(WARP)
        for warp in range(THREADS // WARP):
            own = slice(warp * WARP, (warp + 1) * WARP)
            rows = [self.shared.read(x + offset, 16).view(np.uint16) for x in address[own]]
            for j in range(4):
                matrix = np.stack(rows[8 * j : 8 * j + 8])
                matrix = matrix.T if ".trans" in code else matrix
                found[j, own] = np.stack(
                    [matrix[lane // 4, 2 * (lane % 4) + e] for e in (0, 1)], axis=1
                )
        return [x.view(np.uint32)[:, 0] for x in found]

    def _multiply(self, code, operands, offsets):
        """Executes mma.m16n8k16: lane 4 g + t has rows g, g + 8 and columns 2 t, 2 t + 1, etc."""
        dtype = BFLOAT16 if "bf16" in code else np.dtype(np.float16)
        of_a, of_b, c = operands[:4], operands[4:6], operands[6:]
        found = np.empty((4, THREADS), np.float32)
        lane = np.arange(WARP)
        g, t = lane // 4, 2 * (lane % 4)
        for warp in range(THREADS // WARP):
            own = slice(warp * WARP, (warp + 1) * WARP)
            a, b = np.empty((16, 16), np.float32), np.empty((16, 8), np.float32)
            for i, register in enumerate(of_a):
                for e, half in enumerate(_halves(register[own], dtype)):
                    a[g + 8 * (i % 2), t + e + 8 * (i // 2)] = half
            for i, register in enumerate(of_b):
                for e, half in enumerate(_halves(register[own], dtype)):
                    b[t + e + 8 * i, g] = half
            product = a @ b
            for i in range(4):
                found[i, own] = c[i][own] + product[g + 8 * (i // 2), t + i % 2]
        return list(found)

    def _store(self, code, operands, offsets):
        memory = self.shared if "shared" in code else self.device
        address, *values = operands
        for thread in self._threads():
            data = np.array([x[thread] for x in values]).view(np.uint8)
            assert data.size == 4 * len(values), code
            memory.write(address[thread] + offsets[0], data)

    def _read(self, code, operands, offsets):
        (address,), (offset,), count = operands, offsets.values(), _count(code)
        found = np.zeros((count, THREADS), np.uint32)
        for thread in self._threads():
            found[:, thread] = self.shared.read(address[thread] + offset, 4 * count).view("u4")
        found = found.view("f4") if name_of(code).endswith(".f32") else found
        return list(found) if count > 1 else found[0]

    def _add(self, code, operands, offsets):
        """Executes red.global.add of one float32 or of several adjacent ones."""
        address, *values = operands
        assert len(values) == _count(code), code
        for thread in self._threads():
            place = address[thread] + offsets[0]
            before = self.device.read(place, 4 * len(values)).view(np.float32)
            after = before + np.array([x[thread] for x in values], np.float32)
            self.device.write(place, after.view(np.uint8))

    def _read_floats(self, code, operands, offsets):
        (address,), (offset,), count = operands, offsets.values(), _count(code)
        found = np.zeros((count, THREADS), np.float32)
        for thread in self._threads():
            found[:, thread] = self.device.read(address[thread] + offset, 4 * count).view("f4")
        return list(found) if count > 1 else found[0]

    def _memory(self, address) -> Memory:
        return self.device if address >= GLOBAL else self.shared

    def _load(self, kind, address, alignment: int = 1):
        size, kind = kind if isinstance(kind, tuple) else (1, kind)
        dtype, places = _dtype(kind), _unsigned(address)
        assert not (places % alignment).any()
        read = lambda x: self._memory(x).read(x, size * dtype.itemsize).view(dtype)
        data = [read(x) for x in places]
        return np.stack(data) if size > 1 else np.concatenate(data)

    def _write(self, values, address, alignment: int = 1):
        places = _unsigned(address)
        assert not (places % alignment).any()
        for thread in self._threads():
            place = places[thread]
            self._memory(place).write(place, np.ascontiguousarray(values[thread]).view(np.uint8))


def _bytes_of(x, y, selector):
    """Executes prmt.b32 without sign replication: each nibble selects a byte of y and x."""
    both = x.astype(np.uint64) | y.astype(np.uint64) << np.uint64(32)
    found = np.zeros_like(both)
    for n in range(4):
        place = (selector.astype(np.uint64) >> np.uint64(4 * n) & np.uint64(7)) * np.uint64(8)
        found |= (both >> place & np.uint64(0xFF)) << np.uint64(8 * n)
    return found.astype(np.uint32)


def _fused(dtype):
    """Returns fma.rn of two halves; the sum of a product in float64 is exact here."""

    def run(*operands):
        x, y, z = (
            np.ascontiguousarray(a)[:, None].view(dtype).astype(np.float64) for a in operands
        )
        return np.ascontiguousarray((x * y + z).astype(dtype)).view(np.uint32)[:, 0]

    return run


def _flushed(x, y, z):
    """Returns fma.rn.ftz.f32; the product of two float32 in float64 is exact."""
    flush = lambda a: np.where(np.abs(a) < np.float32(2.0**-126), np.float32(0.0), a)
    with np.errstate(invalid="ignore"):  # a NaN
        x, y, z = (flush(a.view(np.float32)).astype(np.float64) for a in (x, y, z))
        return flush((x * y + z).astype(np.float32)).view(np.uint32)


def _quotient(x, y):
    """Returns div.full.ftz.f32, here rounded to the nearest."""
    flush = lambda a: np.where(np.abs(a) < np.float32(2.0**-126), a * np.float32(0.0), a)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return flush(flush(x.view(np.float32)) / flush(y.view(np.float32))).view(np.uint32)


def _difference(dtype):
    """Returns sub of two halves."""

    def run(*operands):
        x, y = (np.ascontiguousarray(a)[:, None].view(dtype) for a in operands)
        return np.ascontiguousarray((x - y).astype(dtype)).view(np.uint32)[:, 0]

    return run


_OPERATIONS = {
    "mov.b32": lambda x: x,
    "prmt.b32": _bytes_of,
    "and.b32": np.bitwise_and,
    "or.b32": np.bitwise_or,
    "xor.b32": np.bitwise_xor,
    "shr.u32": np.right_shift,
    "add.u32": np.add,
    "mul.lo.u32": np.multiply,
    "sub.bf16x2": _difference(BFLOAT16),
    "sub.f16x2": _difference(np.dtype(np.float16)),
    "fma.rn.ftz.f32": _flushed,
    "div.full.ftz.f32": _quotient,
    "fma.rn.bf16x2": _fused(BFLOAT16),
    "fma.rn.f16x2": _fused(np.dtype(np.float16)),
}


def _computed(code: str, operands):
    """Executes one instruction, or a block, on words; $0 is the result."""
    known = {f"${i + 1}": np.uint32(x) for i, x in enumerate(operands)}
    lines = code.strip("{} ").split(";")
    for line in lines[1:] if code.startswith("{") else lines:  # the first one names registers
        if not line.strip():
            continue
        name, rest = line.strip().split(" ", 1)
        place, *given = rest.split(", ")
        values = [known[x] if x in known else _unsigned(np.uint32(int(x, 0))) for x in given]
        known[place] = _OPERATIONS[name](*values)
    return known["$0"]


class _BFloat16:
    """Stand-in for ir.BF16Type."""

    itemsize = 2


def name_of(code: str) -> str:
    """Returns the instruction's name with all of its modifiers."""
    return re.match(r"[a-z0-9.:_A-Z]+", code).group()


def _count(code: str) -> int:
    """Returns the elements of a vector instruction, 1 for a scalar one."""
    found = re.search(r"\.v(\d)\.", code)
    return int(found.group(1)) if found else 1


def _halves(register, dtype):
    """Unpacks both elements of 32-bit registers, each one number per thread."""
    return register[:, None].view(dtype).astype(np.float32).T


def _dtype(kind):
    """Converts an element type to numpy's dtype."""
    if isinstance(kind, str):
        return np.dtype(f"u{int(kind[1:]) // 8}")
    return BFLOAT16 if isinstance(kind, _BFloat16) else kind


def _bits(kind, register):
    """Bitcasts a vector of two halves, or one 32-bit value, to a 32-bit register; or back."""
    if isinstance(kind, tuple):
        return np.ascontiguousarray(register)[:, None].view(_dtype(kind[1]))
    return np.ascontiguousarray(register).view(np.uint32)[:, 0]
