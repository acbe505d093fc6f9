"""The shape of the project, checked: import layers, the map in docs/ARCHITECTURE.md, who may speak of torch and CUDA."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PYTHON = ROOT / "python"

# A module imports only from rows below its own, or its own row where that is said. architecture: docs/ARCHITECTURE.md.
LAYERS: dict[str, int] = {
    "errors": 10,
    "request": 11, "config": 11, "metrics": 11, "native": 11,
    "step": 12,
    "cache": 20, "grammar": 20, "backends": 20, "layers": 21, "models": 22,
    "scheduler": 30, "executor": 30,
    "engine.core": 40,
    "text": 41, "engine.collect": 42, "engine.client": 43, "engine.constraint": 43, "engine.calls": 44, "engine.select": 44,
    "engine.grammars": 44, "engine.textside": 45, "engine.wire": 45, "engine.gpu": 45, "engine.build": 46,
    "engine.sync": 50, "engine.aio": 50, "engine.process": 50, "engine.child": 50,
    "serve": 60, "rl": 60, "lang": 60,
    "phloem": 70, "cli": 71,
}  # fmt: skip
NO_TORCH = ("errors", "request", "config", "step", "metrics", "native", "cache", "grammar", "scheduler", "engine.core")
# engine/core.py and the parts that it was cut into.
CORE = ("core", "door", "outputs", "pipeline", "seeds", "stats", "compiling", "control")
# Neither may import the other although their rows would allow it: policy and mechanism meet in engine/core.py alone.
NEVER = {("cache", "backends"), ("scheduler", "executor"), ("executor", "scheduler"), ("scheduler", "models"), ("scheduler", "backends"),
         ("executor", "cache"), ("engine.core", "models"), ("engine.core", "backends"), ("engine.core", "text")}  # fmt: skip


def source_files() -> list[Path]:
    return sorted(p for p in PYTHON.rglob("*.py") if "__pycache__" not in p.parts)


def unit_of(module: str) -> str | None:
    """The key of LAYERS that a dotted module name belongs to."""
    if not module.startswith("phloem"):
        return None
    parts = module.split(".")
    if parts[1:2] == ["runtime"]:
        rest = parts[2:]
        if not rest:
            return None
        if rest[0] == "engine":
            part = rest[1] if len(rest) > 1 else None
            return "engine.core" if part in CORE else part and f"engine.{part}"
        return rest[0]
    if parts[1:2] == ["cli"]:
        return "cli"
    if parts[1:2] == ["lang"]:
        return "lang"
    if parts[1:2] == ["rl"]:
        return "rl"
    return "phloem"


def module_name(path: Path) -> str:
    relative = path.relative_to(PYTHON).with_suffix("")
    parts = list(relative.parts)
    if parts[0] != "phloem":
        parts.insert(0, "phloem")
    if parts[-1] == "__init__":
        parts.pop()
    return ".".join(parts)


def imports_of(path: Path) -> list[tuple[str, int]]:
    """Every module imported anywhere in the file, TYPE_CHECKING blocks and function bodies included."""
    package = module_name(path) if path.name == "__init__.py" else module_name(path).rsplit(".", 1)[0]
    found: list[tuple[str, int]] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                up = package.split(".")[: len(package.split(".")) - (node.level - 1)]
                base = ".".join([*up, base]) if base else ".".join(up)
            found.append((base, node.lineno))
            # `from phloem.runtime import errors` names modules, not attributes
            found += [
                (f"{base}.{alias.name}", node.lineno)
                for alias in node.names
                if base in ("phloem.runtime", "phloem.runtime.engine")
            ]
    return found


@pytest.mark.parametrize("path", source_files(), ids=lambda p: str(p.relative_to(PYTHON)))
def test_imports_go_down(path: Path) -> None:
    own = unit_of(module_name(path))
    if own is None:
        return
    assert own in LAYERS, f"{own} has no row: add it to LAYERS and to docs/ARCHITECTURE.md"
    for target, line in imports_of(path):
        other = unit_of(target)
        if other is None or other == own or (own in ("phloem", "cli") and target == "phloem"):
            continue
        if own == "phloem" and other in LAYERS:
            continue  # the public surface re-exports
        assert other in LAYERS, f"{path}:{line} imports {target}, which has no row"
        assert LAYERS[other] < LAYERS[own], f"{path}:{line}: {own} imports {target}, a row not below its own"
        assert (own, other) not in NEVER, f"{path}:{line}: {own} never imports {other}"


@pytest.mark.parametrize("path", source_files(), ids=lambda p: str(p.relative_to(PYTHON)))
def test_policy_does_not_know_torch(path: Path) -> None:
    if unit_of(module_name(path)) in NO_TORCH:
        heavy = [(name, line) for name, line in imports_of(path) if name.split(".")[0] in ("torch", "transformers")]
        assert not heavy, f"{path} imports {heavy}"


def test_torch_cuda_only_in_the_cuda_backend() -> None:
    for path in source_files():
        if path != PYTHON / "runtime" / "backends" / "cuda" / "device.py":
            tree = ast.parse(path.read_text())
            said = [
                n.lineno for n in ast.walk(tree) if isinstance(n, ast.Attribute) and ast.unparse(n).startswith("torch.cuda")
            ]
            said += [line for name, line in imports_of(path) if name.startswith("torch.cuda")]
            assert not said, f"{path}:{said[0]} says torch.cuda; only backends/cuda/device.py may"


def test_no_environment_variable_is_read_below_the_cli() -> None:
    for path in source_files():
        if "cli" not in path.parts:
            text = path.read_text()
            assert not re.search(r"os\.(environ|getenv)|from os import .*\b(environ|getenv)\b", text), (
                f"{path} reads the environment"
            )


def test_the_map_is_the_disk() -> None:
    """Each file of the source is named in docs/ARCHITECTURE.md, and each file that it names exists."""
    text = (ROOT / "docs" / "ARCHITECTURE.md").read_text()
    block = text.split("```tree\n")[1].split("```")[0]
    named: set[str] = set()
    folder = ""
    for line in block.splitlines():
        head = re.match(r"^(\S+/)\s", line + " ")
        if head:
            folder = head[1]
            continue
        entry = re.match(r"^ +★?\s*(\S+)", line)
        if entry and not line.strip().startswith("·"):
            named.add(folder + entry[1])
    disk = {str(p.relative_to(ROOT)) for p in source_files() if p.name != "__init__.py" or p.stat().st_size > 200}
    disk |= {
        str(p.relative_to(ROOT)) for p in (ROOT / "kernels").rglob("*") if p.suffix in (".h", ".cpp") and "tests" not in p.parts
    }
    assert disk - named == set(), "on disk, not on the map"
    assert {n for n in named if not (ROOT / n).exists()} == set(), "on the map, not on disk"


def test_every_source_file_says_what_it_owns() -> None:
    for path in source_files():
        if path.stat().st_size:
            assert ast.get_docstring(ast.parse(path.read_text())), f"{path} has no header"
