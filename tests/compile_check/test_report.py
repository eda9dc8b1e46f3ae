"""The judge of compiled kernels notices what it is there to notice."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from benchmarks.suites import SUITES
from flash_pallas.backends.hopper import HopperBackend
from flash_pallas.backends.hopper.backend import trades_registers
from flash_pallas.backends.portable import tiling as tiles
from flash_pallas.core.problem import AttentionSpec, Operands, describe

from . import checking, compare, portable_rows, report, rows
from .device import A100, H200, TARGETS, compile_for, dump_to, find_tools

CLEAN = """
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'k_mosaic_gpu_kernel' for 'sm_90a'
ptxas info    : Function properties for k_mosaic_gpu_kernel
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers, 1 bytes smem
"""
SPILLS = CLEAN.replace("0 bytes spill stores", "72 bytes spill stores")
FORWARD = "flash_pallas_portable_forward"
RESOURCES = "Resources(smem_scratch_bytes=197632, tmem_scratch_cols=0, barrier_counts={})"


def _read(folder, ptxas: str, resources: str = RESOURCES) -> report.Report:
    (folder / "k_0.ptxas").write_text(ptxas)
    (folder / "k_0.resources.txt").write_text(resources)
    (only,) = report.take(folder)
    assert not list(folder.iterdir())
    return only


def _remark(code: str, text: str) -> str:
    return CLEAN + f"ptxas info    : ({code}) {text}\n"


def test_clean_kernel_has_no_fault(tmp_path):
    kernel = _read(tmp_path, CLEAN)
    assert (kernel.kernel, kernel.launch_registers, kernel.smem) == ("k", 168, 197632)
    assert kernel.faults(H200, 0) == []


@pytest.mark.parametrize("code", report.SERIALISED)
def test_serialised_wgmma_is_a_fault(tmp_path, code):
    text = _remark(code, "Potential Performance Loss: wgmma.mma_async are serialized")
    assert _read(tmp_path, text).faults(H200, 1000) == [f"wgmma serialised ({code})"]


def test_ignored_setmaxnreg_is_a_fault(tmp_path):
    text = _remark("C7504", "'setmaxnreg' ignored to maintain compatibility")
    assert _read(tmp_path, text).faults(H200, 1000) == ["setmaxnreg ignored (C7504)"]


def test_harmless_remark_is_shown_but_no_fault(tmp_path):
    kernel = _read(tmp_path, _remark("C7519", "warpgroup.arrive is injected"))
    assert (kernel.remarks, kernel.faults(H200, 0)) == (("C7519",), [])


def test_spills_are_held_against_the_allowance(tmp_path):
    kernel = _read(tmp_path, SPILLS)
    assert kernel.faults(H200, 72) == []
    assert kernel.faults(H200, 71) == ["spills 72 bytes, 71 allowed"]


def test_too_many_registers_are_a_fault(tmp_path):
    kernel = _read(tmp_path, CLEAN)
    assert kernel.faults(H200, 0, kernel.launch_registers) == []
    assert kernel.faults(H200, 0, 128) == [f"{kernel.launch_registers} registers, 128 allowed"]


def test_too_much_shared_memory_is_a_fault(tmp_path):
    kernel = _read(tmp_path, CLEAN, RESOURCES.replace("197632", "232449"))
    assert kernel.faults(H200, 0) == ["232449 bytes of shared memory, 232448 exist"]


def test_shared_memory_is_that_of_the_target(tmp_path):
    kernel = _read(tmp_path, CLEAN.replace("sm_90a", "sm_80"))
    assert kernel.faults(A100, 0) == ["197632 bytes of shared memory, 166912 exist"]


def test_other_architecture_is_a_fault(tmp_path):
    kernel = _read(tmp_path, CLEAN.replace("sm_90a", "sm_90"))
    assert kernel.faults(H200, 0) == ["compiled for sm_90, not sm_90a"]


def test_report_without_figures_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="does not say"):
        _read(tmp_path, "ptxas info    : 0 bytes gmem\n")


def test_sass_is_counted(tmp_path):
    lines = [
        "        /*0000*/ HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24 ;   /* 0x0 */",
        "        /*0010*/ @!P0 MUFU.EX2 R237, R5 ;                          /* 0x0 */",
        "        /*0020*/ WARPGROUP.DEPBAR.LE gsb0, 0x1 ;                   /* 0x0 */",
    ]
    (tmp_path / "k_0.sass_ctrl").write_text("\n".join(lines))
    kernel = _read(tmp_path, CLEAN)
    assert kernel.highest_register == 237
    assert kernel.instructions == {"HGMMA": 1, "MUFU.EX2": 1, "WARPGROUP.DEPBAR": 1}


def _sass_of(folder, *lines):
    (folder / "k_0.sass_ctrl").write_text("\n".join(lines))
    return _read(folder, CLEAN).code


def test_digest_of_machine_code_knows_operands_but_not_labels(tmp_path):
    first = "  -:-:-:Y:01  /*0000*/  MOV R1, R2 "
    branch = "  -:-:-:Y:01  /*0010*/  BRA `({}) "
    code = _sass_of(tmp_path, ".L_x_3:", first, branch.format(".L_x_3"))
    assert code == _sass_of(tmp_path, ".L_x_8:", ".L_x_9:", first, branch.format(".L_x_9"))
    assert code != _sass_of(tmp_path, first, ".L_x_3:", branch.format(".L_x_3"))
    assert code != _sass_of(tmp_path, ".L_x_3:", first.replace("R2", "R3"), branch.format(".L_x_3"))
    assert code != _sass_of(tmp_path, ".L_x_3:", first.replace("Y:01", "Y:02"), branch)


def test_digest_of_ptx_knows_no_line_numbers(tmp_path):
    def digest(*lines):
        (tmp_path / "k_0.ptx").write_text("\n".join(lines))
        return _read(tmp_path, CLEAN).ptx

    add, section = "\tadd.s32 %r1, %r2, %r3;", "\t.section .debug_info"
    first = digest("$L__func_begin0:", "\t.loc\t1 56 0", add, section, "{ a }")
    assert first == digest("\t.loc\t2 7 0", "$L__tmp3:", add, section, "{ b }")
    assert first != digest(add.replace("%r3", "%r4"), section, "{ a }")


def _with_code(kernel, code):
    return dict.fromkeys(compare.KEY, "") | {"kernel": kernel, "code": code}


def test_different_machine_code_is_named():
    before = [_with_code("a", "1"), _with_code("b", "2")]
    assert compare.differences(before, before) == []
    assert compare.differences(before, [_with_code("a", "1"), _with_code("b", "3")])[0].startswith(
        "b"
    )
    assert compare.differences(before, before[:1])[0].startswith("b")
    with pytest.raises(ValueError, match="no digest of its code"):
        compare.differences(before, [_with_code("a", None)])


def test_rows_are_distinct_and_cover_the_kernels():
    names = [str(row) for row in rows.rows()]
    assert len(names) == len(set(names)) == 192 + 12 * trades_registers()


def test_no_kernel_of_a_suite_may_spill():
    found = list(rows.suite_rows("quick"))
    assert len(found) == 2 * len(SUITES["quick"])
    kernels = {name for name, *_ in rows.ALLOWED_SPILLS}
    assert not any(row.allowed_spills(kernel) for row in found for kernel in kernels)


def test_portable_rows_are_distinct_and_of_every_tile():
    names = [str(row) for row in portable_rows.portable_rows(A100)]
    assert len(names) == len(set(names))
    smallest = lambda head_dims: next(n for n in tiles._TILES if max(head_dims) <= n)
    assert {smallest(each) for each in portable_rows.HEAD_DIMS} == set(tiles._TILES)


def test_portable_allowances_are_of_rows():
    """Checks that no allowance outlives its row."""
    there = {(row.head_dim, row.mask) for row in portable_rows.portable_rows(A100)}
    tables = (portable_rows.ALLOWED_SPILLS, *portable_rows.ALLOWED_BY_TARGET.values())
    assert {(width, mask) for table in tables for _, width, mask in table} <= there


@pytest.mark.parametrize("name", TARGETS)
def test_portable_tiles_fit(name):
    target = TARGETS[name]
    shared = tiles.SHARED_MEMORY[f"{target.major}.{target.minor}"]
    assert shared == target.smem
    for most, kernels in tiles._TILES.items():
        q = jax.ShapeDtypeStruct((1, 512, 1, most), jnp.bfloat16)
        problem = describe(Operands(q, q, q, None), AttentionSpec(scale=1.0))
        for kernel, tile in kernels.items():
            assert tiles.bytes_of(kernel, tile, problem) <= shared - tiles.RESERVED


def test_backend_of_a_target():
    path = lambda *choice: next(checking.Choice(*choice[1:]).rows(choice[0])).path
    assert path(H200) == "forward" == path(H200, (), "quick")
    assert path(H200, (), None, "portable") == path(A100) == "portable forward"
    assert not list(checking.Choice(("no such row",)).rows(A100))


def test_every_row_has_its_turn():
    of_day = [{str(row) for row in checking.Choice(day=day).rows(H200)} for day in range(20, 23)]
    every = {str(row) for row in rows.rows()}
    assert set.union(*of_day) == every and all(day < every for day in of_day)
    assert all("forward 128 bfloat16 causal" in day for day in of_day)


@pytest.mark.compile
def test_rows_compile_or_say_why_not(tmp_path):
    """Compiles a kernel, a call without kernels, and one that cannot be traced."""
    spec = jax.ShapeDtypeStruct((8,), jnp.float32)
    make = lambda f: rows.Row("forward", 64, "float32", "full", f, (spec,))
    forward = next(row for row in rows.rows() if str(row) == "forward 128 bfloat16 full")
    with dump_to(tmp_path, find_tools()):
        (kernel,), wrong = checking.check(H200, forward, tmp_path)
        assert (kernel.kernel, wrong) == ("flash_pallas_forward", [])
        assert kernel.faults(H200, forward.allowed_spills(kernel.kernel)) == []
        reports, wrong = checking.check(H200, make(lambda x: x + 1), tmp_path)
        assert reports == [] and wrong[0].endswith("ptxas reported no kernel")
        reports, wrong = checking.check(H200, make(lambda x: x + jnp.zeros(3)), tmp_path)
        assert reports == [] and "TypeError" in wrong[0]


@pytest.mark.compile
def test_registers_are_traded_where_the_blocks_think_so(tmp_path):
    """Compiles a kernel that trades registers: a compiler that ignores setmaxnreg says so."""
    q = jax.ShapeDtypeStruct((1, 512, 1, 128), jnp.bfloat16)
    operands, spec = Operands(q, q, q, None), AttentionSpec(scale=1.0)
    backend = HopperBackend(trades_registers=True)
    blocks = backend.blocks(describe(operands, spec), None)
    with dump_to(tmp_path, find_tools()):
        compile_for(H200, lambda o: backend.forward(spec, blocks, o), operands)
    (kernel,) = report.take(tmp_path)
    assert (report.REGISTERS_IGNORED in kernel.remarks) != trades_registers()


def _greedy(target):
    """Returns the row of a kernel that asks for more shared memory than the target has."""

    def kernel(x, out, _):
        out[...] = x[...]

    form = jax.ShapeDtypeStruct((128,), jnp.float32)
    scratch = [plgpu.SMEM((target.smem + 1,), jnp.int8)]
    run = plgpu.kernel(kernel, out_type=form, scratch_types=scratch)
    return rows.Row("greedy", 0, "float32", "none", run, (form,))


def _compiled(target):
    """Compiles the smallest portable row and a greedy one; returns a report, and faults."""
    row = next(portable_rows.portable_rows(target))
    with tempfile.TemporaryDirectory() as name, dump_to(Path(name), find_tools()):
        (kernel,), wrong = checking.check(target, row, Path(name))
        assert wrong == []
        none, wrong = checking.check(target, _greedy(target), Path(name))
    assert none == []
    return kernel, wrong


@pytest.mark.compile
@pytest.mark.parametrize("name", TARGETS)
def test_portable_forward_compiles_for_every_target(name):
    """Compiles in a process of its own, because each process compiles for one architecture only."""
    target = TARGETS[name]
    apart = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=apart) as pool:
        kernel, wrong = pool.submit(_compiled, target).result()
    assert (kernel.kernel, kernel.architecture) == (FORWARD, target.architecture)
    q = jax.ShapeDtypeStruct((1, 512, 1, 16), jnp.bfloat16)
    problem = describe(Operands(q, q, q, None), AttentionSpec(scale=1.0))
    tile = tiles.choose_blocks(problem, None, f"{target.major}.{target.minor}").forward
    assert kernel.smem == tiles.bytes_of("forward", tile, problem)
    assert kernel.faults(target, 0) == []
    assert len(wrong) == 1 and wrong[0].endswith(f"> max_smem_bytes={target.smem}")


@pytest.mark.compile
def test_process_compiles_for_one_architecture():
    spec = jax.ShapeDtypeStruct((8,), jnp.float32)
    compile_for(H200, jnp.negative, spec)
    with pytest.raises(RuntimeError, match="start another one"):
        compile_for(A100, jnp.negative, spec)


def _record(**instructions):
    row = {"path": "forward", "head_dim": 64, "dtype": "bfloat16", "mask": "full"}
    return {"kernel": "k", "instructions": instructions} | row


def test_changed_opcodes_are_found():
    (found,) = compare.changes([_record(FADD=2, FMUL=1)], [_record(FADD=2, FFMA=2)])
    assert (found["before"], found["after"]) == (3, 4)
    assert found["changed"] == {"FMUL": [1, 0], "FFMA": [0, 2]}
    (same,) = compare.changes([_record(FADD=2)], [_record(FADD=2)])
    assert same["changed"] == {}


def test_comparison_without_counts_is_an_error():
    with pytest.raises(ValueError, match="no instruction counts"):
        compare.changes([_record()], [_record(FADD=1)])
    with pytest.raises(ValueError, match="share no kernel"):
        compare.changes([_record(FADD=1) | {"mask": "causal"}], [_record(FADD=1)])
