"""`megarl doctor --nodes`: the same findings on every node of a Slurm allocation, and what is not alike. Pure but for
the one srun.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

from megarl.doctor import Finding, Verdict

TIMEOUT_S = 300.0
_WORST: tuple[Verdict, ...] = ("ok", "warn", "fail")


def ask_nodes() -> dict[str, list[Finding]]:
    """Node -> its findings. Raises ValueError outside of an allocation, or where a node gave no answer."""
    if "SLURM_JOB_ID" not in os.environ:
        raise ValueError("--nodes looks at the nodes of a Slurm allocation: run it inside of one (salloc, sbatch)")
    wanted = int(os.environ.get("SLURM_JOB_NUM_NODES") or os.environ.get("SLURM_NNODES") or 1)
    words = ["srun", "--overlap", f"--nodes={wanted}", f"--ntasks={wanted}", "--ntasks-per-node=1", "--cpu-bind=none"]
    command = [*words, sys.executable, "-m", "megarl", "doctor", "--line"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except FileNotFoundError as error:
        raise ValueError("srun is not on PATH: --nodes needs Slurm's commands") from error
    except subprocess.TimeoutExpired as error:
        raise ValueError(f"the nodes did not answer in {TIMEOUT_S:g} s; so far: {error.stdout!r}") from error
    found = read_lines(done.stdout)
    if len(found) < wanted:
        heard = ", ".join(sorted(found)) or "none"
        raise ValueError(f"{wanted} nodes were asked, and only {heard} answered: {done.stderr.strip()[-500:]}")
    return found


def line(node: str, findings: Sequence[Finding]) -> str:
    """What one node tells: a line of JSON, which srun passes on whole."""
    fields = [[f.what, f.found, f.verdict, f.advice, f.alike] for f in findings]
    return json.dumps({"node": node, "findings": fields})


def read_lines(text: str) -> dict[str, list[Finding]]:
    """Node -> findings, of all lines that are such; what libraries print beside them is left out."""
    found = {}
    for each in text.splitlines():
        if each.startswith('{"node": '):
            told = json.loads(each)
            found[told["node"]] = [Finding(*fields) for fields in told["findings"]]
    return dict(sorted(found.items()))


def compare(nodes: Mapping[str, Sequence[Finding]]) -> list[Finding]:
    """One finding per thing that was looked at: the worst verdict of all nodes, and which nodes say what.

    Where nodes have to be alike (versions, GPUs) and are not, that is a failure in itself.
    """
    merged = []
    for what in dict.fromkeys(finding.what for findings in nodes.values() for finding in findings):
        said = {node: next((f for f in findings if f.what == what), None) for node, findings in nodes.items()}
        there = [finding for finding in said.values() if finding is not None]
        by_value: dict[str, list[str]] = {}
        for node, finding in said.items():
            by_value.setdefault("not looked at" if finding is None else finding.found, []).append(node)
        found = next(iter(by_value))
        if len(by_value) > 1:
            found = "; ".join(f"{value} on {', '.join(names)}" for value, names in by_value.items())
        worst = _WORST[max(_WORST.index(finding.verdict) for finding in there)]
        advice = " / ".join(dict.fromkeys(finding.advice for finding in there if finding.advice))
        if len(by_value) > 1 and there[0].alike:
            worst, advice = "fail", f"not the same on all nodes {advice}".strip()
        merged.append(Finding(what, found, worst, advice, there[0].alike))
    return merged
