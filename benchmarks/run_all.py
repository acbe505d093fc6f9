"""`make bench`: every benchmark here, one after another, each in a process of its own. One JSON line a figure on stdout.

python -m benchmarks.run_all [--quick]
"""

from __future__ import annotations

import argparse
import subprocess
import sys

from benchmarks.common import ROOT, note

QUICK = ("tree", "scheduler", "sampling", "kernels", "attention", "grammar")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the parts only, not the race against peers")
    args = parser.parse_args()
    failed = []
    for name in [*QUICK, *([] if args.quick else ["race"])]:
        note(f"== {name}")
        if subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], cwd=ROOT).returncode:
            failed.append(name)
    if failed:
        note(f"failed: {', '.join(failed)}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
