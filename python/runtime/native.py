"""Loads the kernels' C ABI: pointers in, status codes turned into exceptions. Knows nothing of models, tensors or pages.

    library()  ── finds libphloem_kernels.so: beside this package (wheel, editable install), or build/kernels of a checkout
    Context    ── threads + code variant; every call goes through `Context.check`

The structs mirror kernels/include/phloem*.h field by field; `ABI` is the headers' PHLOEM_ABI.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable
from ctypes import POINTER, Structure, byref, c_char_p, c_double, c_float, c_int, c_int32, c_int64, c_size_t, c_void_p
from pathlib import Path
from typing import Any

from phloem.runtime.errors import EngineClosedError, KernelError

__all__ = [
    "ABI", "MAX_PARTS", "VARIANTS", "AttentionArgs", "Batch", "Context", "Limits", "Op", "OpKind", "Pages", "library", "library_path", "supported_variants",
]  # fmt: skip

ABI = 2
MAX_PARTS = 8
VARIANTS = ("base", "x86-64-v3", "x86-64-v4", "x86-64-v4-vnni")
_FORKED = 4


class OpKind:
    """PHLOEM_OP_* of phloem_program.h."""

    EMBED, RMS_NORM, LINEAR, GATED, ATTENTION, GATHER = range(6)


class AttentionArgs(Structure):
    """phloem_attention_args."""

    _fields_ = [
        *((name, c) for name, c in (("qkv", c_void_p), ("qkv_ld", c_int64), ("out", c_void_p), ("out_ld", c_int64))),
        *((name, c_void_p) for name in ("k_cache", "v_cache", "rope_cos", "rope_sin", "q_norm", "k_norm")),
        *((name, c_void_p) for name in ("positions", "qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_len", "kv_slots")),
        *(
            (name, c_int32)
            for name in ("num_rows", "num_tokens", "kv_type", "heads", "kv_heads", "head_dim", "page_size", "num_pages")
        ),
        *((name, c_int32) for name in ("rotary_dim", "max_positions", "window")),
        *((name, c_float) for name in ("scale", "softcap", "norm_eps")),
    ]


class Op(Structure):
    """phloem_op."""

    _fields_ = [
        *((name, c_int32) for name in ("kind", "width", "num_matrices")),
        ("eps", c_float),
        *((name, c) for name, c in (("x", c_void_p), ("x_ld", c_int64), ("y", c_void_p), ("y_ld", c_int64))),
        ("vector", c_void_p),
        ("residual", c_void_p),
        ("residual_ld", c_int64),
        ("matrices", c_void_p * MAX_PARTS),
        ("attention", POINTER(AttentionArgs)),
    ]


class Limits(Structure):
    """phloem_limits."""

    _fields_ = [(name, c_int32) for name in ("max_tokens", "max_rows", "max_logits", "max_pages")]


class Pages(Structure):
    """phloem_pages."""

    _fields_ = [
        ("planes", POINTER(c_void_p)),
        *((name, c_int32) for name in ("num_planes", "num_pages", "page_size")),
        ("page_bytes", c_int64),
    ]


class Batch(Structure):
    """phloem_batch."""

    _fields_ = [
        *(
            (name, c_void_p)
            for name in ("token_ids", "positions", "kv_slots", "qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_len")
        ),
        *((name, c_void_p) for name in ("logit_rows", "copies")),
        *((name, c_int32) for name in ("num_tokens", "num_rows", "num_pages", "num_logits", "num_copies")),
        ("logits", c_void_p),
    ]


_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "phloem_abi": (c_int, []),
    "phloem_supported": (c_int, [c_int]),
    "phloem_create": (c_int, [c_int, c_int, POINTER(c_void_p)]),
    "phloem_create_error": (c_char_p, []),
    "phloem_destroy": (None, [c_void_p]),
    "phloem_error": (c_char_p, [c_void_p]),
    "phloem_variant": (c_int, [c_void_p]),
    "phloem_memory_allocate": (c_int, [c_void_p, c_int64, POINTER(c_void_p)]),
    "phloem_memory_release": (None, [c_void_p, c_void_p]),
    "phloem_matrix_pack": (c_int, [c_void_p, c_int, c_int, c_int, c_void_p, c_int64, POINTER(c_void_p)]),
    "phloem_matrix_share": (c_int, [c_void_p, c_int, c_int, c_int, c_void_p, c_int64, POINTER(c_void_p)]),
    "phloem_matrix_destroy": (None, [c_void_p, c_void_p]),
    "phloem_matrix_empty": (c_int, [c_void_p, c_int, c_int, c_int, POINTER(c_void_p)]),
    "phloem_matrix_store": (c_int, [c_void_p, c_void_p, c_int, c_void_p, c_int64]),
    "phloem_matrix_copy": (c_int, [c_void_p, c_void_p, c_void_p]),
    "phloem_matrix_discard": (c_int64, [c_void_p, c_void_p]),
    "phloem_memory_discard": (c_int64, [c_void_p, c_void_p, c_int64]),
    "phloem_gather": (c_int, [c_void_p, c_void_p, c_int64, c_int, c_void_p]),
    "phloem_matrix_bytes": (c_int64, [c_void_p]),
    "phloem_linear": (
        c_int,
        [c_void_p, POINTER(c_void_p), c_int, c_int, c_void_p, c_int64, c_int, c_void_p, c_void_p, c_int64, c_void_p, c_int64],
    ),
    "phloem_embed": (c_int, [c_void_p, c_void_p, c_void_p, c_int, c_void_p, c_int64]),
    "phloem_rms_norm": (c_int, [c_void_p, c_void_p, c_int64, c_void_p, c_float, c_int, c_int, c_void_p, c_int64]),
    "phloem_ceiling_read": (c_int, [c_void_p, c_void_p, c_int64]),
    "phloem_ceiling_fma": (c_int, [c_void_p, c_int64, POINTER(c_double)]),
    "phloem_ceiling_dot": (c_int, [c_void_p, c_int64, POINTER(c_double)]),
    "phloem_copy_pages": (c_int, [c_void_p, POINTER(c_void_p), c_int32, c_size_t, c_void_p, c_int32, c_int32]),
    "phloem_program_create": (c_int, [c_void_p, POINTER(Op), c_int32, POINTER(Limits), POINTER(Pages), POINTER(c_void_p)]),
    "phloem_program_destroy": (None, [c_void_p]),
    "phloem_struct_bytes": (c_int64, [c_int]),
    "phloem_program_profile": (None, [c_void_p, c_void_p]),
    "phloem_program_run": (c_int, [c_void_p, POINTER(Batch)]),
}


def library_path() -> Path:
    """The library file; of several, the one built last. Raises KernelError that lists where it looked."""
    name = "libphloem_kernels" + {"darwin": ".dylib", "win32": ".dll"}.get(sys.platform, ".so")
    package = sys.modules[__package__ or "phloem.runtime"]
    folders = [
        Path(folder) for folder in package.__path__
    ]  # an editable install has two: the sources, and where it put the library
    checkout = Path(__file__).resolve().parents[2]
    if (checkout / "kernels" / "CMakeLists.txt").is_file():
        folders.append(checkout / "build" / "kernels")
    found = [folder / name for folder in dict.fromkeys(folders) if (folder / name).is_file()]
    if not found:
        places = ", ".join(str(folder) for folder in folders)
        raise KernelError(f"{name} is not in {places}. Install the package (pip install .), or in a checkout build it: "
                          "cmake -S kernels -B build/kernels && cmake --build build/kernels.")  # fmt: skip
    return max(found, key=lambda path: path.stat().st_mtime)


@functools.cache
def library() -> ctypes.CDLL:
    """The loaded library, its functions typed. Raises KernelError if it is missing, broken, or of another version."""
    path = library_path()
    try:
        loaded = ctypes.CDLL(str(path))
        abi = loaded.phloem_abi()
    except (OSError, AttributeError) as error:
        raise KernelError(f"{path} cannot be loaded: {error}. Build it again.") from error
    if abi != ABI:
        raise KernelError(f"{path} speaks ABI {abi}, this package {ABI}. Build it again.")
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    return loaded


def supported_variants() -> tuple[str, ...]:
    """Names of the code variants that this CPU runs, best last."""
    return tuple(name for number, name in enumerate(VARIANTS) if library().phloem_supported(number))


class Context:
    """Threads and a code variant. One thread at a time may be in a call.

    threads: >= 1, the calling one included.   variant: "auto" (the best this CPU runs) or one of VARIANTS.
    Raises KernelError for a variant that is not one, or that this CPU lacks.
    """

    def __init__(self, threads: int = 1, variant: str = "auto") -> None:
        if variant != "auto" and variant not in VARIANTS:
            raise KernelError(f"kernel variant is {variant!r}; expected 'auto' or one of {', '.join(VARIANTS)}.")
        self.library = library()
        self.threads = threads
        handle = c_void_p()
        number = -1 if variant == "auto" else VARIANTS.index(variant)
        if self.library.phloem_create(threads, number, byref(handle)):
            raise KernelError(f"the kernels refused: {self.library.phloem_create_error().decode()}.")
        self._handle: int | None = handle.value
        self.variant = VARIANTS[self.library.phloem_variant(handle)]

    @property
    def handle(self) -> int:
        """For the C functions. Raises EngineClosedError after close()."""
        if self._handle is None:
            raise EngineClosedError("this backend was closed; make another.")
        return self._handle

    @property
    def closed(self) -> bool:
        return self._handle is None

    def check(self, status: int) -> None:
        """Raises if a C call that returned `status` failed: KernelError, or EngineClosedError in a fork()ed child."""
        if status:
            message = self.library.phloem_error(self.handle).decode()
            raise (EngineClosedError if status == _FORKED else KernelError)(f"{message}.")

    def make(self, function: Callable[..., int], *arguments: Any) -> int:
        """Calls a C constructor whose last argument is the result's place; returns the result's address."""
        result = c_void_p()
        self.check(function(self.handle, *arguments, byref(result)))
        assert result.value is not None
        return result.value

    def allocate(self, size: int) -> int:
        """Address of `size` zeroed bytes, 64-byte aligned, in huge pages where there are any; freed with the context, or `release`."""
        return self.make(self.library.phloem_memory_allocate, size)

    def release(self, address: int) -> None:
        if self._handle is not None:
            self.library.phloem_memory_release(self._handle, address)

    def close(self) -> None:
        """Ends the threads and frees all memory: whatever was made from this context is gone. Twice is fine."""
        handle, self._handle = self._handle, None
        if handle is not None:
            self.library.phloem_destroy(handle)

    def __del__(self) -> None:
        if getattr(self, "_handle", None) is not None:
            self.close()
