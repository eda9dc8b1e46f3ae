"""The house's rules of language, checked by `make lint`.

    python -m tests.language

A docstring is a sentence. That of a function begins with a verb in the third person, as in "Returns
the row sums."; those of modules, classes, properties and fixtures may begin with what they name.
None begins with a word that can only continue another sentence. Docstrings and comments use the
field's terms.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOTS = ("flash_pallas", "benchmarks", "tests", "examples", "docs")

# A docstring that begins so continues a sentence that nobody began.
FRAGMENTS = re.compile(
    "A(fter|nd|s|t)|B(ecause|efore|eside|ut|y)|F(or|rom)|How|I[fn]|Likewise|O[fnr]|S(ince|o|ome)|"
    "T(hat|hen|hose|o)|Wh(at|en|ere|ether|ich|ile|o|ose|y)|With(out)?"
)
# Words in "s" that are no verbs.
NO_VERBS = re.compile("A(cross|lways|s)|Besides|Class|Its|Less|P(lus|ass)|T(his|hose|hus)")
# What the field says instead.
SYNONYMS = {
    r"multiprocessors?": "SM",
    r"blocks? of threads": "CTA",
    r"grouped queries": "GQA",
    r"beside": "next to, besides, or overlapped with",
}
NOUN_DECORATORS = frozenset(("property", "cached_property", "fixture"))


def decorators(node: ast.AST) -> set[str]:
    """Returns the names of a function's decorators, without what qualifies them."""
    found = set()
    for each in getattr(node, "decorator_list", ()):
        each = each.func if isinstance(each, ast.Call) else each
        found.add(each.attr if isinstance(each, ast.Attribute) else getattr(each, "id", ""))
    return found


def faults_of(node: ast.AST, text: str) -> Iterator[str]:
    """Yields what is wrong with the docstring `text` of a module, class or function."""
    first = text.split("\n\n")[0].rstrip()
    word = re.split(r"[\s,.:;]", text, maxsplit=1)[0]
    is_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    if is_function and not decorators(node) & NOUN_DECORATORS:
        if not re.fullmatch(r"[A-Z][a-z]+(-[a-z]+)*s", word) or NO_VERBS.fullmatch(word):
            yield f"begins with {word!r}: say what the function does, as in 'Returns ...'"
    elif FRAGMENTS.fullmatch(word):
        yield f"begins with {word!r}: make it a sentence that says what this is"
    if not first.endswith((".", ":", "?", "!")):
        yield "the first paragraph does not end in a full stop"
    prose = re.sub(r"(?m)^\s*\w+(, \w+)*:|`[^`]*`", "", text)  # without names
    yield from wrong_terms(prose)


def wrong_terms(prose: str) -> Iterator[str]:
    """Yields the words for which the field has others."""
    for synonym, term in SYNONYMS.items():
        if found := re.search(rf"\b{synonym}\b", prose, re.IGNORECASE):
            yield f"says {found.group()!r}: the field says {term}"


def faults_in(path: Path) -> Iterator[str]:
    """Yields `file:line: name: fault` of every docstring and comment in a file."""
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.COMMENT:
                line = token.start[0]
                yield from (f"{path}:{line}: comment: {x}" for x in wrong_terms(token.string))
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if text := ast.get_docstring(node):
            name, line = getattr(node, "name", "module"), getattr(node, "lineno", 1)
            yield from (f"{path}:{line}: {name}: {fault}" for fault in faults_of(node, text))


def main() -> int:
    """Prints all faults of the files or folders that are named; returns 1 if there is one."""
    parser = argparse.ArgumentParser(prog="python -m tests.language", description=__doc__)
    parser.add_argument("paths", nargs="*", type=Path, default=[Path(root) for root in ROOTS])
    found = []
    for path in parser.parse_args().paths:
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            found += faults_in(file)
    sys.stdout.write("\n".join([*found, f"{len(found)} faults of language", ""]))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
