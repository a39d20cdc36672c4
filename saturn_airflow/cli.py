"""The command line: ``saturn plan ...`` and its sisters.

A subcommand is one module of :mod:`saturn_airflow.commands` with ``add(parser)`` and ``run(args) -> int``;
only the one that is asked for imports the rooms it needs.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from saturn_airflow.errors import SaturnError

#: Name and one line of help of each subcommand; its module has the same name.
COMMANDS = {
    "cluster": "start the services of the compose file on this machine",
    "demo": "run the nightly DAG on this machine, start to end",
    "devices": "show who holds the devices of this machine, or announce them",
    "doctor": "check the deployment, and say what to mend",
    "estimates": "show how fast jobs train under which strategy, as far as earlier sweeps know",
    "plan": "plan the jobs of a problem file, and say what the plan is worth",
    "simulate": "run the jobs of a problem file on paper, with wrong estimates, failures and rounds",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; errors a user can mend are one line on stderr and exit code 2."""
    parser = argparse.ArgumentParser(prog="saturn", description="Train many models at once.")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="command")
    words = list(sys.argv[1:] if argv is None else argv)
    for name, text in COMMANDS.items():
        sub = subparsers.add_parser(name, help=text, description=text)
        if name in words[:1]:
            importlib.import_module(f"saturn_airflow.commands.{name}").add(sub)
    args = parser.parse_args(words)
    try:
        return int(importlib.import_module(f"saturn_airflow.commands.{args.command}").run(args))
    except SaturnError as error:
        print(f"saturn {args.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
