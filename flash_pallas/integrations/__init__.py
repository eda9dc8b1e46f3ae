"""Attention of other libraries on flash_pallas, without a change to their code or weights.

Each module is one library and imports it when it is installed, not before:

- `equinox`: `to_flash(model)`
- `gemma`, `keras`, `levanter`, `maxtext`, `transformers`: `install()`, `uninstall()` and
  `installed()`, a context manager
"""
