"""A plan as plain data, and as tables for people."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from megarl.config import RunConfig
from megarl.planning.advice import Change, Problem
from megarl.planning.devices import GIB
from megarl.planning.options import PHASES, Option
from megarl.planning.request import RECOMPUTE
from megarl.planning.search import Plan
from megarl.planning.workload import Expectations

Data = dict[str, Any]


def plan_as_data(cfg: RunConfig, plan: Plan, problem: Problem, expect: Expectations) -> Data:
    """What --json prints of a plan that fits. Seconds are per step, idle shares of a step."""
    other = problem.setting.rates.other_s
    step = plan.step + other
    return {
        **_head(cfg, problem, expect),
        "fits": True,
        "predicted_seconds": _rounded({**plan.seconds, "other": other, "step": step}),
        "predicted_idle_share": round(plan.idle_share * plan.step / step, 4),
        "predicted_run_hours": round(cfg.steps * step / 3600, 1),
        "gpus_used": sum(o.gpus for o in plan.options.values()) if plan.placement == "dedicated" else _gpus(problem),
        "host_gib_per_node": round(plan.host_gib, 1),
        "agents": {name: _agent(plan, name, option, step) for name, option in plan.options.items()},
        "overrides": overrides(cfg, plan),
    }


def misfit_as_data(
    cfg: RunConfig, problem: Problem, lacking: Sequence[str], remedies: Sequence[Change], expect: Expectations
) -> Data:
    """What --json prints where nothing fits: what is missing, and changes of which the first is the smallest."""
    changes = [{"change": c.what, "predicted_step_seconds": round(c.step_seconds, 1)} for c in remedies]
    return {
        **_head(cfg, problem, expect),
        "fits": False,
        "missing": list(lacking),
        "smallest_change": changes[0]["change"] if changes else None,
        "changes": changes,
        "agents": {need.name: {"model": cfg.agents[need.name].model, "fits": False} for need in problem.needs},
    }


def _head(cfg: RunConfig, problem: Problem, expect: Expectations) -> Data:
    machine = problem.setting.machine
    work = {need.name: need.work for need in problem.needs}
    return {
        "experiment": cfg.experiment,
        "device": machine.device.name,
        "nodes": machine.nodes,
        "gpus_per_node": machine.gpus_per_node,
        "placement": problem.placement,
        "assumed": {
            "prompt_tokens": {name: round(w.turns[0].prompt_tokens) for name, w in work.items()},
            "response_tokens": {name: round(w.turns[0].lengths.mean) for name, w in work.items()},
            "response_spread": expect.spread,
            "samples": {name: sum(turn.samples for turn in w.turns) for name, w in work.items()},
            "refit": problem.setting.refit,
            "logits": problem.setting.logits,
            "usable_gib_per_gpu": round(problem.setting.usable / GIB, 1),
        },
    }


def _gpus(problem: Problem) -> int:
    return problem.setting.machine.gpus


def _agent(plan: Plan, name: str, option: Option, step: float) -> Data:
    layout = option.layout
    seconds = _rounded({**option.seconds, "step": option.step})
    return {
        "model": option.need.shape.name,
        "parameters": option.need.shape.parameters,
        "trainable": option.need.shape.trainable and layout.ep == 1,
        "fits": True,
        "gpus": option.gpus,
        "layout": {
            **{key: getattr(layout, key) for key in ("tp", "pp", "cp", "dp", "ep", "sp")},
            "engine_tp": option.engine_tp,
            "max_sequences": option.need.max_sequences,
            "engine_replicas": max(1, option.gpus // option.engine_tp),
            "tokens_per_microbatch": option.choice.tokens_per_microbatch,
            "recompute": option.choice.recompute,
        },
        "placement": {"kind": plan.placement, "gpus_by_node": {str(n): g for n, g in plan.seats[name].items()}},
        "gib_per_gpu": {phase: round(memory.total / GIB, 2) for phase, memory in option.memory.items()},
        "gib_per_gpu_parts": {phase: _parts(memory) for phase, memory in option.memory.items()},
        "host_gib_per_node": round(plan.host_gib, 1),
        "predicted_seconds": seconds,
        "predicted_idle_share": round(plan.idle[name] * plan.step / step, 4),
    }


def _parts(memory: Any) -> dict[str, float]:
    return {name: round(getattr(memory, name) / GIB, 2) for name in memory.__slots__ if getattr(memory, name)}


def _rounded(seconds: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 2) for name, value in seconds.items()}


def overrides(cfg: RunConfig, plan: Plan) -> list[str]:
    """What to append to `megarl train` so that it runs as planned."""
    found = []
    for name, option in plan.options.items():
        layout = option.layout
        sizes = [f"{key}: {size}" for key, size in (("tp", layout.tp), ("pp", layout.pp), ("cp", layout.cp))]
        sizes += [f"dp: {layout.dp}", f"sp: {str(layout.sp).lower()}"]
        found += [
            f"agents.{name}.layout={{{', '.join(sizes)}}}",
            f"agents.{name}.engine={{tp: {option.engine_tp}, max_sequences: {option.need.max_sequences}}}",
        ]
    choice = next(iter(plan.options.values())).choice
    found.append(f"batch.tokens_per_microbatch={choice.tokens_per_microbatch}")
    found += [
        f"megatron.{key}={str(value).replace(chr(39), '')}"
        for key, value in RECOMPUTE[choice.recompute].items()
        if cfg.megatron.get(key) != value
    ]
    return found


# ---------------------------------------------------------------- for people


def print_plan(console: Console, data: Data) -> None:
    """One screen: who sits where, what fills the memory, where the time goes."""
    console.print(_title(data), f": fits, [bold]{data['predicted_seconds']['step']:.0f} s[/] a step", sep="")
    table = Table("agent", "GPUs", "policy", "engine", "GiB per GPU", *(f"{p} s" for p in PHASES), "idle", box=SIMPLE)
    for name, agent in data["agents"].items():
        table.add_row(*_row(name, agent))
    seconds = data["predicted_seconds"]
    table.add_section()
    cohort = (f"{seconds[p]:.0f}" for p in PHASES)
    table.add_row("[bold]cohort[/]", str(data["gpus_used"]), "", "", "", *cohort, f"{data['predicted_idle_share']:.0%}")
    console.print(table)
    assumed = data["assumed"]
    chosen = next(iter(data["agents"].values()))["layout"]
    console.print(
        f"GiB per GPU: rollout/train/refit, of {assumed['usable_gib_per_gpu']} usable. Host: up to "
        f"{data['host_gib_per_node']:.0f} GiB per node. Recompute: {chosen['recompute']}; "
        f"{chosen['tokens_per_microbatch']} tokens per microbatch.\n"
        f"A phase lasts as long as its slowest agent (idle: waiting); {seconds['other']:.0f} s lie between phases."
        f" The run: {data['predicted_run_hours']:g} h.\n"
        f"Assumed: responses of {_spread(assumed['response_tokens'])} tokens (--response-share), prompts of "
        f"{_spread(assumed['prompt_tokens'])} (--prompt-tokens).",
        highlight=False,
    )
    if not all(agent["trainable"] for agent in data["agents"].values()):
        console.print("Planned only: `megarl train` does not build every one of these models or layouts yet.")
    console.print(
        "To run it:", *(f"  '{text}'" for text in data["overrides"]), sep="\n", highlight=False, soft_wrap=True
    )


def _row(name: str, agent: Data) -> list[str]:
    layout = agent["layout"]
    sizes = [f"{key.upper()}{layout[key]}" for key in ("tp", "pp", "cp", "dp", "ep") if layout[key] > 1]
    return [
        f"{name} {agent['parameters'] / 1e9:.1f}B",
        str(agent["gpus"]),
        " ".join(sizes) or "1",
        f"TP{layout['engine_tp']} x{layout['engine_replicas']}",
        "/".join(f"{agent['gib_per_gpu'][phase]:.0f}" for phase in ("rollout", "train", "refit")),
        *(f"{agent['predicted_seconds'][phase]:.0f}" for phase in PHASES),
        f"{agent['predicted_idle_share']:.0%}",
    ]


def _spread(values: Mapping[str, int]) -> str:
    return "/".join(str(value) for value in dict.fromkeys(values.values()))


def _title(data: Data) -> str:
    return (
        f"[bold]{data['experiment']}[/] on {data['nodes']} x {data['gpus_per_node']} {data['device'].upper()}, "
        f"{data['placement']}"
    )


def print_misfit(console: Console, data: Data) -> None:
    console.print(_title(data), ": [bold]does not fit[/]", sep="")
    for line in data["missing"]:
        console.print(f"  {line}", highlight=False, soft_wrap=True)
    if not data["changes"]:
        console.print("No single change of those tried would fit.")
        return
    console.print("Would fit, the smallest change first:")
    for change in data["changes"]:
        console.print(
            f"  {change['change']}  ({change['predicted_step_seconds']:.0f} s a step)", highlight=False, soft_wrap=True
        )


def print_study(console: Console, rows: Sequence[Mapping[str, float | str]]) -> None:
    """What the simulator says, one line per number of nodes."""
    table = Table("nodes", "barrier per phase", "dataflow", "shared GPUs", "idle: barrier", "dataflow", "shared")
    schedules = [row for row in rows if row["question"] == "schedule"]
    for nodes in dict.fromkeys(row["nodes"] for row in schedules):
        mine = {row["schedule"]: row for row in schedules if row["nodes"] == nodes}
        kinds = [mine[kind] for kind in ("phases", "dataflow", "shared")]
        table.add_row(
            str(nodes),
            *(f"{row['seconds_per_step']} s" for row in kinds),
            *(f"{float(row['idle_share']):.1%}" for row in kinds),
        )
    console.print(table)
    studied = [row for row in rows if row["question"] == "checkpoints"]
    for nodes in dict.fromkeys(row["nodes"] for row in studied):
        best = min((row for row in studied if row["nodes"] == nodes), key=lambda row: float(row["seconds_per_step"]))
        console.print(
            f"{nodes} nodes: a checkpoint every {best['interval']} steps costs least: {best['seconds_per_step']} s"
        )
