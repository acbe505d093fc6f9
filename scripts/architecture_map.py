"""Writes the tree of docs/ARCHITECTURE.md from the first sentence of each file's header: run it after adding a file.

    python scripts/architecture_map.py

The stars of the spine and the order of the folders are kept as they are in the page; new folders come after the ones they stand beside.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "ARCHITECTURE.md"
WIDTH = 94
ROOTS = ("python/phloem", "python/lang", "python/runtime", "kernels")


def first_sentence(path: Path) -> str:
    """Up to the first full stop that ends a sentence, on one line, cut at WIDTH."""
    text = path.read_text()
    if path.suffix == ".py":
        text = ast.get_docstring(ast.parse(text)) or ""
    else:
        text = " ".join(
            re.sub(r"^(/\*+|\*/|//|\*)\s?", "", line) for line in text.splitlines() if line.startswith(("//", "/*", " *"))
        )
    text = " ".join(text.split("\n\n")[0].split())
    text = re.split(r"(?<=[^.A-Z])\.(?=\s|$)", text)[0]
    return text if len(text) <= WIDTH else text[: WIDTH - 1].rsplit(" ", 1)[0] + " …"


def wanted(path: Path) -> bool:
    if "__pycache__" in path.parts or "tests" in path.parts:
        return False
    if path.suffix == ".py":
        return path.name != "__init__.py" or path.stat().st_size > 200
    return path.suffix in (".h", ".cpp")


def main() -> None:
    text = PAGE.read_text()
    before, rest = text.split("```tree\n")
    block, after = rest.split("```", 1)
    starred: set[str] = set()
    known: dict[str, str] = {}
    order: list[str] = []
    folder = ""
    for line in block.splitlines():
        if head := re.match(r"^(\S+/)\s*$", line + " "):
            folder = head[1]
            order.append(folder)
        elif entry := re.match(r"^ +(★?)\s*(\S+)\s*(.*)$", line):
            known[folder + entry[2]] = entry[3]
            if entry[1]:
                starred.add(folder + entry[2])
    files: dict[str, list[Path]] = {}
    for root in ROOTS:
        for path in sorted((ROOT / root).rglob("*")):
            if path.is_file() and wanted(path):
                files.setdefault(f"{path.parent.relative_to(ROOT)}/", []).append(path)
    for name in files:
        if name not in order:
            near = [i for i, other in enumerate(order) if other.split("/")[:2] == name.split("/")[:2]]
            order.insert(near[-1] + 1 if near else len(order), name)
    lines: list[str] = []
    for name in order:
        if name not in files:
            continue
        lines.append(name)
        for path in files[name]:
            key = str(path.relative_to(ROOT))
            star = "★" if key in starred else " "
            sentence = known[key] if path.suffix != ".py" and key in known else first_sentence(path)
            lines.append(f"  {star} {path.name:<22} {sentence}".rstrip())
    PAGE.write_text(before + "```tree\n" + "\n".join(lines) + "\n```" + after)


if __name__ == "__main__":
    main()
