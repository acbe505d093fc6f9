"""What `import phloem` promises: the names, their order, and that it costs nothing."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import phloem
from phloem.runtime import errors

INIT = Path(__file__).resolve().parent.parent / "python" / "phloem" / "__init__.py"

NAMES = [
    "AsyncEngine",
    "AsyncGroup",
    "AsyncState",
    "AsyncStream",
    "BackendUnavailable",
    "BackendUnsupported",
    "Call",
    "Cancelled",
    "Capabilities",
    "CapacityError",
    "CheckFailed",
    "ChoiceScore",
    "ChoiceScores",
    "ConfigError",
    "ContextLengthError",
    "Delta",
    "Done",
    "Engine",
    "EngineBusyError",
    "EngineClosedError",
    "EngineConfig",
    "EngineDeadError",
    "EngineSuspendedError",
    "FloatRange",
    "Gen",
    "GrammarDeadEnd",
    "GrammarError",
    "Group",
    "IncompleteOutput",
    "IntRange",
    "InvalidRequestError",
    "KernelError",
    "LimitExceeded",
    "MismatchError",
    "ModelLoadError",
    "NumericalError",
    "OpenAI",
    "Output",
    "Partial",
    "PhloemError",
    "Program",
    "ProgramError",
    "ProgramTimeout",
    "Replay",
    "ReplayMismatch",
    "Reply",
    "RequestError",
    "RequestTimeoutError",
    "RolloutEngine",
    "Run",
    "RunUsage",
    "RuntimeEndpoint",
    "SamplingParams",
    "Scripted",
    "Select",
    "Selection",
    "StaleVersionError",
    "State",
    "Stream",
    "Token",
    "TokenLogprob",
    "ToolArgs",
    "ToolFailed",
    "Trace",
    "UncommittedWeightsError",
    "UnsupportedModelError",
    "Usage",
    "WeightLayoutError",
    "WeightsError",
    "WeightsInvalidError",
    "as_tool",
    "assistant",
    "fork_each",
    "function",
    "gen",
    "gen_int",
    "gen_string",
    "limits",
    "plain",
    "react",
    "ref",
    "role",
    "select",
    "set_default_backend",
    "special",
    "system",
    "tool",
    "usage_of",
    "user",
]


def fresh_modules(code: str) -> set[str]:
    """sys.modules after `code` in a new interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys; print(*sys.modules)"], capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


def test_the_public_names_are_these() -> None:
    """Changing the list is a decision: it is what other programs import."""
    assert phloem.__all__ == NAMES
    assert phloem.__all__ == sorted(phloem.__all__)


@pytest.mark.parametrize("name", NAMES)
def test_each_name_resolves_and_is_listed(name: str) -> None:
    value = getattr(phloem, name)
    assert value.__name__.lower() == name.lower()  # `limits` is the class Limits, spelled as the block that it is
    assert name in dir(phloem)


def test_every_error_is_public() -> None:
    assert {n for n in errors.__all__ if n != "from_wire"} <= set(phloem.__all__)


def test_type_checkers_see_the_same_names() -> None:
    """The lazy names are imported once more under TYPE_CHECKING: the two lists must not drift."""
    block = next(n for n in ast.parse(INIT.read_text()).body if isinstance(n, ast.If))
    imported = {alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert sorted(imported) == NAMES
    for name, module in imported.items():
        assert module is not None
        assert getattr(importlib.import_module(module), name) is getattr(phloem, name)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Enginee'"):
        _ = phloem.Enginee  # type: ignore[attr-defined]


def test_star_import_gives_what_all_says() -> None:
    namespace: dict[str, object] = {}
    exec("from phloem import *", namespace)
    assert set(NAMES) <= set(namespace)


@pytest.mark.parametrize(
    "code", ["import phloem", "import phloem; phloem.SamplingParams(); phloem.EngineConfig(); phloem.ConfigError"]
)
def test_import_loads_neither_torch_nor_transformers(code: str) -> None:
    assert not fresh_modules(code) & {"torch", "transformers", "tokenizers", "numpy", "typer", "rich"}


def test_the_package_is_marked_as_typed() -> None:
    assert (INIT.parent / "py.typed").exists()
