"""Prints what the CPU set-up installs by name: pyproject.toml's requirements, one a line, but for xgrammar's triton.

    python scripts/requirements.py [extra ...]

xgrammar requires triton, a gigabyte that no CPU uses. The Makefile installs xgrammar by itself, and here stand its other needs.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

ALONE = "xgrammar"
ITS_NEEDS = ("apache-tvm-ffi>=0.1.11", "pydantic>=2", "transformers>=4.38", "typing-extensions>=4.9")


def main(extras: list[str]) -> None:
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *ITS_NEEDS]
    for extra in extras:
        lines += project["optional-dependencies"][extra]
    print("\n".join(line for line in lines if not line.startswith(ALONE)))


if __name__ == "__main__":
    main(sys.argv[1:])
