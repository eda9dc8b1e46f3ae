"""Attention of other libraries on flash_pallas, without changes to their code or weights.

Each module serves one library. It is imported on request, and imports its library then or later:

- `equinox`: `to_flash(model)`
- `gemma`, `keras`, `levanter`, `maxtext`, `transformers`: `install()`, `uninstall()` and
  `installed()`, a context manager
"""

from typing import TYPE_CHECKING, Any

from .._lazy import module_of

__all__ = ["equinox", "gemma", "keras", "levanter", "maxtext", "transformers"]

if TYPE_CHECKING:
    from . import equinox as equinox
    from . import gemma as gemma
    from . import keras as keras
    from . import levanter as levanter
    from . import maxtext as maxtext
    from . import transformers as transformers
else:

    def __getattr__(name: str) -> Any:
        return module_of(__name__, tuple(__all__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
