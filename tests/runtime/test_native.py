"""Where the library is found, how it is refused, and what a context promises."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from phloem.runtime import native
from phloem.runtime.errors import EngineClosedError, KernelError
from phloem.runtime.native import Context


def test_structs_are_as_long_as_the_headers_say() -> None:
    """A field that only one side has would shift all after it."""
    structs = (native.AttentionArgs, native.Op, native.Limits, native.Pages, native.Batch)
    assert [native.library().phloem_struct_bytes(i) for i in range(6)] == [*(ctypes.sizeof(struct) for struct in structs), 0]


def test_the_last_built_library_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = native.library_path().name
    package = sys.modules["phloem.runtime"]
    monkeypatch.setattr(package, "__path__", [str(tmp_path)])
    (tmp_path / name).write_bytes(b"")
    assert native.library_path() == tmp_path / name


def test_no_library_says_where_it_looked_and_how_to_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["phloem.runtime"], "__path__", [str(tmp_path)])
    monkeypatch.setattr(native, "__file__", str(tmp_path / "a" / "b" / "native.py"))
    with pytest.raises(KernelError, match=f"{tmp_path}.*pip install"):
        native.library_path()


def test_a_broken_library_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"no such thing")
    monkeypatch.setattr(native, "library_path", lambda: broken)
    with pytest.raises(KernelError, match=r"cannot be loaded.*Build it again"):
        native.library.__wrapped__()


def test_a_library_of_another_abi_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "ABI", 99)
    with pytest.raises(KernelError, match=r"speaks ABI \d+, this package 99"):
        native.library.__wrapped__()


def test_loading_does_not_import_torch() -> None:
    code = "import sys, phloem.runtime.native as n; n.Context(1).close(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_contexts_of_every_variant() -> None:
    assert native.supported_variants()[0] == "base"
    for name in native.supported_variants():
        context = Context(2, name)
        assert context.variant == name
        context.close()
    best = Context(1)
    assert best.variant == native.supported_variants()[-1]
    best.close()


@pytest.mark.parametrize(
    ("threads", "variant", "says"), [(0, "auto", "threads is 0"), (1025, "auto", "1 to 1024"), (1, "sse9", "'sse9'; expected")]
)
def test_contexts_that_cannot_be(threads: int, variant: str, says: str) -> None:
    with pytest.raises(KernelError, match=says):
        Context(threads, variant)


def test_a_failed_call_raises_with_the_kernels_words() -> None:
    context = Context(1)
    with pytest.raises(KernelError, match="there is no matrix kind 77"):
        context.make(context.library.phloem_matrix_pack, 77, 1, 1, ctypes.addressof(ctypes.c_float()), 4)
    context.close()
    with pytest.raises(EngineClosedError):
        context.allocate(1)


def test_workers_end_with_their_context() -> None:
    def threads() -> int:
        return len(list(Path("/proc/self/task").iterdir()))

    if not Path("/proc/self/task").is_dir():
        pytest.skip("counts the process's threads in /proc")
    Context(1).close()
    before = threads()
    contexts = [Context(3) for _ in range(3)]
    assert threads() == before + 6
    for context in contexts:
        context.close()
    assert threads() == before
    assert threading.active_count() >= 1
    alone = Context(1)
    assert threads() == before
    alone.close()


def test_allocated_memory_is_zero_and_aligned() -> None:
    context = Context(1)
    address = context.allocate(1000)
    assert address % 64 == 0
    assert ctypes.string_at(address, 1000) == bytes(1000)
    ctypes.memset(address, 7, 1000)
    context.release(address)
    again = context.allocate(1000)
    assert ctypes.string_at(again, 1000) == bytes(1000)
    context.close()
