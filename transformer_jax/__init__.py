"""A functional model zoo in JAX and Flax, from the LSTM translator to current decoders and beyond text.

The package exports the models and configs of `models.registry`, and `configure`, `train` and `load` of `tasks`.
Each is imported on first use, so that importing this package imports nothing else.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformer_jax.models.registry import *  # noqa: F403
    from transformer_jax.tasks import configure as configure
    from transformer_jax.tasks import load as load
    from transformer_jax.tasks import train as train

__version__ = "0.1.0"

_FUNCTIONS = ("configure", "load", "train")


def _models() -> dict[str, type]:
    return importlib.import_module(f"{__name__}.models.registry").PUBLIC


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return [*_models(), *_FUNCTIONS]
    if name in _FUNCTIONS:
        value = getattr(importlib.import_module(f"{__name__}.tasks"), name)
    # Names of modules are lower case; looking one up must not import every model.
    elif name[:1].isupper() and name in _models():
        value = _models()[name]
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})
