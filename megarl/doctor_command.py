"""`megarl doctor`: this machine, or all nodes of a Slurm allocation, as a table."""

import argparse
import json
import os
import socket
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from megarl import doctor_nodes
from megarl.doctor import Finding, examine


def run(argv: Sequence[str]) -> int:
    """0: nothing fails; 1: something does."""
    parser = argparse.ArgumentParser(prog="megarl doctor", description="is this machine fit to train on?")
    parser.add_argument("--json", action="store_true", help="findings as a list of objects")
    parser.add_argument("--nodes", action="store_true", help="on every node of this Slurm allocation, and compared")
    parser.add_argument("--line", action="store_true", help=argparse.SUPPRESS)  # what --nodes asks of each node
    args = parser.parse_args(argv)
    if args.line:
        print(doctor_nodes.line(os.environ.get("SLURMD_NODENAME") or socket.gethostname(), [*examine(os.environ)]))
        return 0
    findings = doctor_nodes.compare(doctor_nodes.ask_nodes()) if args.nodes else list(examine(os.environ))
    if args.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        Console().print(_table(findings))
    return 1 if any(finding.verdict == "fail" for finding in findings) else 0


def _table(findings: Sequence[Finding]) -> Table:
    table = Table(title="megarl doctor")
    for title in ("", "what", "found", ""):
        table.add_column(title, overflow="fold")
    colours = {"ok": "green", "warn": "yellow", "fail": "bold red"}
    for finding in findings:
        verdict = f"[{colours[finding.verdict]}]{finding.verdict}[/]"
        table.add_row(verdict, finding.what, finding.found, finding.advice)
    return table
