"""The drawing of random faults; `python -m tests.faults` puts them into a copy."""

from __future__ import annotations

from . import faults


def test_faults_are_drawn_of_every_kind():
    found = faults.draw(1, 10)
    assert found == faults.draw(1, 10) != faults.draw(2, 10)
    assert [each.kind for each in found] == list(faults.KINDS) * 2
    for each in found:
        data = (faults.ROOT / each.file).read_bytes()
        assert data[each.start : each.end].decode() == each.old != each.new


def test_every_kind_of_edit(tmp_path, monkeypatch):
    monkeypatch.setattr(faults, "ROOT", tmp_path)
    path = tmp_path / "a.py"
    path.write_text("é = lambda x, y: f(x, y) if x < (y) else x.sum(axis=-1) + True\n")
    edits = {(each.kind, each.old, each.new) for each in faults.faults_of(path)}
    assert edits == {
        ("arguments", "x, y", "y, x"),
        ("comparison", "<", "<="),
        ("operator", "+", "-"),
        ("axis", "-1", "0"),
        ("constant", "1", "2"),
        ("constant", "True", "False"),
    }


def test_no_edit_of_what_is_only_said(tmp_path, monkeypatch):
    monkeypatch.setattr(faults, "ROOT", tmp_path)
    path = tmp_path / "a.py"
    path.write_text('def f(x: "1" | 2 = None) -> 3 | 4:\n    raise ValueError(f"{x + 1}")\n')
    assert not list(faults.faults_of(path))


def test_tests_that_name_the_module_run_first():
    fault = faults.Fault("operator", "flash_pallas/core/drafts.py", 1, 0, 1, "", "")
    found = faults.ordered(faults.ROOT / "tests", fault)
    assert found[0] == "tests/test_decode_drafts.py" and "tests/test_faults.py" in found
