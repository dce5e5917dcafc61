"""`megarl reshard --explain`: what a refit moves between training and engine layout, without weights and GPUs."""

import argparse
import gc
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from megarl.backends.shards.engine import engine_layout
from megarl.backends.shards.explain import explained, print_explained
from megarl.backends.shards.plan import Plan, make_plan
from megarl.backends.shards.topology import PRESETS, Topology, read_topology
from megarl.backends.shards.training import training_layout
from megarl.config import RunConfig, compose
from megarl.planning.calibration import load_rates
from megarl.planning.models import read_shape
from megarl.planning.request import layout_of
from megarl.settings import AgentConfig

SUMS = ("model_bytes", "wire_bytes", "lower_bound_bytes", "full_gather_bytes", "local_bytes")
SUMS += ("nvlink_bytes", "network_bytes")


def run(argv: Sequence[str]) -> int:
    """0: explained. Raises ValueError for what cannot be planned."""
    parser = argparse.ArgumentParser(prog="megarl reshard", description=__doc__)
    parser.add_argument("overrides", nargs="*", help="+experiment=NAME and key=value")
    parser.add_argument("--explain", action="store_true", required=True, help="print the plan of every agent's refit")
    parser.add_argument("--json", action="store_true", help="for scripts")
    parser.add_argument("--topology", choices=PRESETS, default="h100-8x-ib400", metavar="PRESET", help=f"of {PRESETS}")
    parser.add_argument("--config-dir", type=Path, help="a folder of your own experiment/, algo/ ... YAML files")
    args = parser.parse_intermixed_args(argv)
    gc.disable()  # up to millions of small records, none of them in a cycle: looking for cycles takes half the time
    try:
        _explain(compose(args.overrides, args.config_dir), args.topology, as_json=args.json)
    finally:
        gc.enable()
    return 0


def _explain(cfg: RunConfig, preset: str, *, as_json: bool) -> None:
    topology = read_topology(preset, cfg.cluster.gpus_per_node, load_rates(None).link_efficiency)
    agents: dict[str, dict[str, Any]] = {}
    console = Console(width=None if sys.stdout.isatty() else 120)
    for name, agent in cfg.agents.items():
        agents[name] = {"model": agent.model, "layout": str(agent.layout), **explained(plan_of(agent, topology))}
        if not as_json:
            title = (
                f"{agent.model} {agent.layout} to {agent.replicas} x TP{agent.engine.tp}, {topology.name}; GB (10^9)"
            )
            print_explained(console, name, title, agents[name])
    if as_json:
        print(json.dumps(_as_data(cfg.experiment, topology, agents), indent=1))


def plan_of(agent: AgentConfig, topology: Topology) -> Plan:
    """The checked plan of an agent's refit. Raises ValueError for a model or layout that has none."""
    shape, itemsize = read_shape(agent.model), 2 if agent.dtype == "bfloat16" else 4
    training = training_layout(shape, layout_of(agent.layout), itemsize)
    plan = make_plan(training, engine_layout(shape, agent.engine.tp, agent.replicas, itemsize), topology)
    plan.check()
    return plan


def _as_data(experiment: str, topology: Topology, agents: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Sums over the agents, which refit side by side, and each of them."""
    bound = sum(data["lower_bound_bytes"] for data in agents.values())
    total = {key: sum(data[key] for data in agents.values()) for key in SUMS}
    return {
        "experiment": experiment,
        "topology": {
            "name": topology.name,
            "gpus_per_node": topology.gpus_per_node,
            "nvlink_bytes_per_s": topology.nvlink_bytes_per_s,
            "network_bytes_per_s": topology.network_bytes_per_s,
            "memory_bytes_per_s": topology.memory_bytes_per_s,
        },
        **total,
        "wire_over_bound": total["wire_bytes"] / bound if bound else 1.0,
        "predicted_seconds": max(data["predicted_seconds"] for data in agents.values()),
        "full_gather_seconds": max(data["full_gather_seconds"] for data in agents.values()),
        "agents": agents,
    }
