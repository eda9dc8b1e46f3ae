"""Commands of the package: `python -m flash_pallas doctor` and `... conformance`."""

from __future__ import annotations

import sys

from . import conformance, doctor

COMMANDS = {"doctor": doctor.main, "conformance": conformance.main}


def main() -> int:
    """Runs the command that the first argument names; returns its exit status."""
    name, *rest = sys.argv[1:] or ["--help"]
    if name in COMMANDS:
        return COMMANDS[name](rest)
    sys.stderr.write(f"usage: python -m flash_pallas {{{','.join(COMMANDS)}}} ...\n")
    return 0 if name in ("-h", "--help") else 2


if __name__ == "__main__":
    sys.exit(main())
