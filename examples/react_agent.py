"""ReAct with two real tools: a calculator, and a search over a small text file. The model calls them until it answers.

    question ── call search ── lines found ── call calculator ── number ── answer

A tool that fails is seen by the model and ends nothing. The calculator reads arithmetic and nothing else: no eval.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import phloem as ph

HARBOUR = Path(__file__).parent / "data" / "harbour.txt"
QUESTION = "How long are the two piers of Skarn together, in metres?"
_BINARY: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda a, b: a / b,
    ast.FloorDiv: lambda a, b: a // b,
    ast.Mod: operator.mod,
}


def calculator(expression: str) -> float:
    """The value of an arithmetic expression such as "(120 + 85) * 2"."""
    if len(expression) > 200:
        raise ValueError("the expression is longer than 200 characters")
    return _value(ast.parse(expression.strip(), mode="eval").body)


def _value(node: ast.expr) -> float:
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)) and not isinstance(node.value, bool):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.UAdd, ast.USub)):
        value = _value(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        found: float = _BINARY[type(node.op)](_value(node.left), _value(node.right))
        if not math.isfinite(found) or abs(found) > 1e300:
            raise ValueError("the result is too large")
        return found
    raise ValueError("only numbers, + - * / // % and brackets are understood")


def search(words: str) -> list[str]:
    """The three lines about the harbour of Skarn that hold most of these words."""
    wanted = set(re.findall(r"\w+", words.lower()))
    lines = HARBOUR.read_text(encoding="utf-8").splitlines()
    ranked = sorted(lines, key=lambda line: -len(wanted & set(re.findall(r"\w+", line.lower()))))
    return [line for line in ranked[:3] if wanted & set(re.findall(r"\w+", line.lower()))]


@ph.function
def agent(s: ph.State, question: str, max_steps: int = 4, max_tokens: int = 80) -> str:
    s += ph.system("Find out what you do not know with the functions, then answer in one sentence.")
    s += ph.user(question)
    return ph.react(s, [search, calculator], max_steps=max_steps, max_tokens=max_tokens)


def main(backend: Any, **sizes: int) -> ph.Run[Any]:
    return agent.run(question=QUESTION, temperature=0, backend=backend, **sizes)


if __name__ == "__main__":
    from present import present

    present(main, __doc__)
