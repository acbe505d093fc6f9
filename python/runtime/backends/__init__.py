"""Backends: the only place where devices differ. One file each; a new one is a file and a line in `BACKENDS`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, cast

from phloem.runtime.errors import ConfigError

if TYPE_CHECKING:
    from phloem.runtime.backends.base import Backend

__all__ = ["BACKENDS", "create_backend"]

BACKENDS = {"reference": "reference:Reference", "cpu": "cpu:Cpu", "cuda": "cuda:Cuda"}


def create_backend(name: str, *, threads: int = 1, **options: Any) -> Backend:
    """The backend of this name, made anew: nothing is shared between two of them.

    threads: how many the backend may use at most; `reference` takes one whatever the number.
    options: the backend's own.   Raises ConfigError for a name that is not in `BACKENDS`, and for a device that is not there.
    """
    if name not in BACKENDS:
        known = ", ".join(repr(n) for n in BACKENDS)
        raise ConfigError(f"device is {name!r}; expected one of {known}.", param="device")
    module, _, attribute = BACKENDS[name].partition(":")
    kind = getattr(importlib.import_module(f"{__name__}.{module}"), attribute)
    return cast("Backend", kind(threads=threads, **options))
