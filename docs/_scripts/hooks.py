"""Hooks of MkDocs: pictures and tables take the place of their markers while the site is built.

The header of every page links to the code once hatch_build.py knows the address of the repository.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from pathlib import Path

HERE = Path(__file__).parent
# What a marker begins with, and the module that replaces it.
MARKERS = {"<!-- picture:": "pictures", "<!-- results:": "performance"}

os.environ.setdefault("JAX_PLATFORMS", "cpu")


def on_config(config):
    """Sets the address of the code, of which the package's metadata has the one copy."""
    text = (HERE.parent.parent / "hatch_build.py").read_text()
    config["repo_url"] = re.findall('^REPOSITORY = "(.*)"$', text, re.MULTILINE)[0] or None
    return config


def on_page_markdown(markdown: str, **_) -> str:
    """Returns the text of a page with its markers replaced by what they stand for.

    Raises:
        ValueError: a marker is not written as the module says that replaces it.
    """
    for marker, module in MARKERS.items():
        if marker in markdown:
            markdown = _imported(module).replaced(markdown)
            if marker in markdown:
                raise ValueError(f"docs/_scripts/{module}.py says how '{marker}' is written")
    return markdown


def _imported(module: str):
    # MkDocs takes back what a hook adds to the path while it is loaded.
    for folder in (str(HERE.parent.parent), str(HERE)):
        if folder not in sys.path:
            sys.path.insert(0, folder)
    return importlib.import_module(module)
