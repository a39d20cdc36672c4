"""``saturn doctor``: is the deployment as it should be, and what is to be mended?"""

from __future__ import annotations

import argparse
import json


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.description = (
        "Check the deployment that this machine's Airflow configuration describes: versions, Airflow, queues "
        "and their workers, the devices of each node, limits, shared storage, device locks, MLflow. Exit "
        "status: 0 when nothing is wrong (warnings allowed), 1 when something is."
    )
    parser.add_argument(
        "--node",
        metavar="NAME",
        help="check this machine alone, as that node; for nodes whose workers do not answer",
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def run(args: argparse.Namespace) -> int:
    """Check, and say what was found as it is found."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from saturn_airflow.deployment.checks import examine, examine_node, summary
    from saturn_airflow.deployment.findings import Finding
    from saturn_airflow.model.printable import printable

    console = Console()
    marks = {"ok": ("✔", "green"), "warning": ("!", "yellow"), "problem": ("✘", "red")}
    findings: list[Finding] = []
    for finding in examine_node(args.node) if args.node else examine():
        findings.append(finding)
        if args.json:
            continue
        mark, style = marks[finding.level]
        line = Table.grid(padding=(0, 1))
        line.add_column(width=1)
        line.add_column(width=8)
        line.add_column()
        line.add_row(Text(mark, style), Text(finding.check, "bold"), Text(printable(finding.text)))
        if finding.fix:
            line.add_row("", "", Text(f"→ {finding.fix}", style))
        console.print(line)
    count = summary(findings)
    if args.json:
        found = [finding.to_dict() for finding in findings]
        print(json.dumps({"findings": found, "counts": count}, indent=2))
    else:
        console.print(f"{count['problem']} problems, {count['warning']} warnings", highlight=False)
    return 1 if count["problem"] else 0
