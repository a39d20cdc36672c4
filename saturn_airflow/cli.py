"""The command line: ``saturn plan ...`` and the others.

A subcommand is one module of :mod:`saturn_airflow.commands` with ``add(parser)`` and ``run(args) -> int``,
the exit status. Only the one that is asked for is imported, and imports the packages it needs as it runs.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import importlib
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version

from saturn_airflow.commands.examples import below_help
from saturn_airflow.model.errors import SaturnError
from saturn_airflow.model.printable import printable

#: Name and one line of help of each subcommand; its module has the same name.
COMMANDS = {
    "cluster": "start the services of the compose file on this machine",
    "demo": "run the nightly DAG on this machine, start to end",
    "devices": "show who holds the devices of this machine, or announce them",
    "doctor": "check the deployment, and say what to mend",
    "drain": "keep new plans off nodes, such as before maintenance",
    "estimates": "show how fast jobs train under which strategy, as far as earlier sweeps know",
    "plan": "plan the jobs of a problem file, and say what the plan is worth",
    "pools": "make the Airflow pools in which tasks of sweeps wait",
    "restart": "say whether jobs of a DAG run start from scratch or go on when they are cleared",
    "simulate": "run a problem file, or sweeps that arrive, on paper: wrong estimates, failures, rounds",
    "sweeps": "list the sweeps MLflow knows, or show the jobs of one",
    "train": "train one job of a DAG in this process, where breakpoints work",
    "undrain": "let plans use drained nodes again",
    "why": "say when jobs of active sweeps are expected to run, and what they wait for",
}
_BELOW = """\
`saturn COMMAND --help` explains a command, with examples. Exit status: 0 when all is well, 1 when what was
looked at or run is not (a failed job, a problem the doctor found), 2 when the command could not do its work,
130 after Ctrl-C.

In bash and zsh, the Tab key completes commands and options after
  eval "$(register-python-argcomplete saturn)"
"""


class _Help(argparse.HelpFormatter):
    """Wraps descriptions as usual, and leaves what stands below the options as it is."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if "\n" in text:
            return "".join(f"{indent}{line}" for line in text.splitlines(keepends=True))
        return super()._fill_text(text, width, indent)


def parser_of(commands: Sequence[str]) -> argparse.ArgumentParser:
    """The parser, with the arguments of these commands; the others have none yet."""
    parser = argparse.ArgumentParser(
        prog="saturn",
        description="Train many models at once: plan, watch and look after sweeps from the command line.",
        epilog=_BELOW,
        formatter_class=_Help,
    )
    parser.add_argument("--version", action="version", version=f"saturn-airflow {version('saturn-airflow')}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, text in COMMANDS.items():
        said = f"{text[0].upper()}{text[1:]}."
        sub = subparsers.add_parser(
            name, help=text, description=said, epilog=below_help(name), formatter_class=_Help
        )
        if name in commands:
            importlib.import_module(f"saturn_airflow.commands.{name}").add(sub)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; errors a user can mend are one line on stderr and exit code 2."""
    if "_ARGCOMPLETE" in os.environ:  # the shell asks what may come next
        import argcomplete

        argcomplete.autocomplete(parser_of(list(COMMANDS)))
    # Otherwise Python spends up to half a second of exit on taking numba's compiled functions apart.
    atexit.register(gc.freeze)
    words = list(sys.argv[1:] if argv is None else argv)
    args = parser_of(words[:1]).parse_args(words)
    try:
        return int(importlib.import_module(f"saturn_airflow.commands.{args.command}").run(args))
    except SaturnError as error:
        print(f"saturn {args.command}: {printable(str(error))}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # who reads has seen enough, as `head` has
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
