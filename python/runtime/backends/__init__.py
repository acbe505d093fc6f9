"""Backends: the only place where devices differ. One file each; a new one is a file and a line in `BACKENDS`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, cast

from phloem.runtime.errors import ConfigError

if TYPE_CHECKING:
    from phloem.runtime.backends.base import Backend

__all__ = ["BACKENDS", "create_backend"]

BACKENDS = {"reference": "reference:Reference", "cpu": "cpu:Cpu"}
_LATER = {"cuda": "the CUDA backend is not in this version"}


def create_backend(name: str, *, threads: int = 1) -> Backend:
    """The backend of this name, made anew: nothing is shared between two of them.

    threads: how many the backend may use at most; `reference` takes one whatever the number.
    Raises ConfigError for a name that is not in `BACKENDS`.
    """
    if name in _LATER:
        known = ", ".join(repr(n) for n in BACKENDS)
        raise ConfigError(f"device is {name!r}, but {_LATER[name]}. Use one of {known}.", param="device")
    if name not in BACKENDS:
        known = ", ".join(repr(n) for n in BACKENDS)
        raise ConfigError(f"device is {name!r}; expected one of {known}.", param="device")
    module, _, attribute = BACKENDS[name].partition(":")
    kind = getattr(importlib.import_module(f"{__name__}.{module}"), attribute)
    return cast("Backend", kind(threads=threads))
