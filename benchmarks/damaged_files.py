"""Damaged inputs that readers of files were tried with: `python benchmarks/damaged_files.py [--out FILE]`.

Runs the tests that damage files (tests/formats/test_damaged_files.py, tests/training/test_damaged_leases.py)
with more inputs than the suite does, and prints how many were tried of each kind, and how many of those were
refused in a message; the others were read as far as they can be. It fails where anything else happened.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from machine import describe

ROOT = Path(__file__).parents[1]
TESTS = ("tests/formats/test_damaged_files.py", "tests/training/test_damaged_leases.py")


def main() -> None:
    """Try, print, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, default=1000, help="inputs of each kind")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder, "results.json")
        variables = {"SATURN_FUZZ_EXAMPLES": str(args.examples), "SATURN_FUZZ_RESULTS": str(results)}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS]
        subprocess.run(command, cwd=ROOT, env={**os.environ, **variables}, check=True)
        kinds = json.loads(results.read_text())
    figures = {
        "examples_of_each_test": args.examples,
        "folders_of_leases": args.examples,
        "inputs": sum(kind["tried"] for kind in kinds.values()),
        "kinds": kinds,
        "machine": describe(),
    }
    print(json.dumps(figures, indent=2))
    if args.out:
        args.out.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
