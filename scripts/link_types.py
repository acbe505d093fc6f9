"""Builds build/types/phloem, a tree of links that shows the package as it is imported, for type checkers.

Type checkers do not see through the editable install's import hook. Run by `make types`.
"""

from __future__ import annotations

import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    target = ROOT / "build" / "types" / "phloem"
    if target.exists():
        shutil.rmtree(target)
    target.mkdir(parents=True)
    for entry in sorted((ROOT / "python" / "phloem").iterdir()):
        if entry.name != "__pycache__":
            (target / entry.name).symlink_to(entry)
    for name in ("runtime", "lang"):
        if (ROOT / "python" / name).is_dir():
            (target / name).symlink_to(ROOT / "python" / name)
    (target / "triton").symlink_to(ROOT / "kernels" / "triton")


if __name__ == "__main__":
    main()
