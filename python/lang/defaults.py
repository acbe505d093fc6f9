"""What SGLang's programs set once for all: the default backend, and `global_config`. The only state of the language that belongs to no run."""

from __future__ import annotations

from typing import Any

from phloem.lang.backend import as_backend

__all__ = [
    "GlobalConfig",
    "default_backend",
    "default_template",
    "flush_cache",
    "get_server_info",
    "global_config",
    "set_default_backend",
]


class GlobalConfig:
    """default_backend: where programs run that name none.   chat_template: a name or source, None is the model's own."""

    def __init__(self) -> None:
        self.default_backend: Any = None
        self.chat_template: str | None = None
        self.verbosity = 0  # SGLang's; errors are raised here, so there is nothing to print
        self.enable_parallel_encoding = True  # SGLang's: joins with concate_and_append are always there
        self.enable_precache_with_tracing = True  # SGLang's: what a batch shares is always computed first


global_config = GlobalConfig()


def set_default_backend(backend: Any) -> None:
    """An Engine, AsyncEngine, RuntimeEndpoint, OpenAI, Scripted, or None."""
    if backend is not None:
        as_backend(backend)
    global_config.default_backend = backend


def default_backend() -> Any:
    return global_config.default_backend


def default_template() -> str | None:
    return global_config.chat_template


def flush_cache(backend: Any = None) -> int:
    """Forget every cached prefix of the backend (the default one)."""
    return as_backend(backend if backend is not None else default_backend()).flush()


def get_server_info(backend: Any = None) -> dict[str, Any]:
    """What the backend says of itself."""
    return as_backend(backend if backend is not None else default_backend()).info()
