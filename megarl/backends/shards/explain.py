"""A plan in figures: bytes per rank and link beside the lower bound and beside a full gather."""

from collections import defaultdict
from typing import Any

from rich.console import Console
from rich.table import Table

from megarl.backends.shards.boxes import Box, covered, whole
from megarl.backends.shards.layout import Layout
from megarl.backends.shards.plan import Plan, lower_bound
from megarl.backends.shards.topology import Topology

MANY = 64  # ranks: more are shown node by node


def full_gather(training: Layout, topology: Topology) -> list[dict[str, int]]:
    """Per rank the bytes it receives where every rank builds every full tensor, its own shards excluded.

    What its node holds comes over NVLink, the rest by the network: the least that such an export needs.
    """
    found = [{"nvlink": 0, "network": 0} for _ in range(training.world)]
    for name, tensor in training.tensors.items():
        by_rank: dict[int, set[Box]] = defaultdict(set)
        by_node: dict[int, set[Box]] = defaultdict(set)
        for rank, shard in training.holders[name]:
            by_rank[rank].add(shard.box)
            by_node[topology.node(rank)].add(shard.box)
        every = whole(tensor.shape)
        for rank, bytes_of in enumerate(found):
            own = covered(every, frozenset(by_rank[rank])) * tensor.itemsize
            near = covered(every, frozenset(by_node[topology.node(rank)])) * tensor.itemsize
            bytes_of["nvlink"] += near - own
            bytes_of["network"] += tensor.nbytes - near
    return found


def explained(plan: Plan) -> dict[str, Any]:
    """Figures of a plan for --json; ``*_bytes`` at the top are sums over destinations."""
    topology, gather = plan.topology, full_gather(plan.training, plan.topology)
    received = {tier: plan.received(tier) for tier in ("local", "nvlink", "network")}
    idle = {"nvlink": 0, "network": 0}
    ranks = []
    for rank in range(plan.world):
        gathered = gather[rank] if rank < len(gather) else idle
        ranks.append(
            {
                "rank": rank,
                "node": topology.node(rank),
                "local_bytes": received["local"][rank],
                "nvlink_bytes": received["nvlink"][rank],
                "network_bytes": received["network"][rank],
                "lower_bound_bytes": lower_bound(plan.training, plan.engine, rank) if rank < plan.engine.world else 0,
                "full_gather_bytes": gathered["nvlink"] + gathered["network"],
            }
        )
    total = {key: sum(row[key] for row in ranks) for key in ranks[0] if key.endswith("_bytes")}
    bound = total["lower_bound_bytes"]
    return {
        "model_bytes": plan.training.nbytes,
        "wire_bytes": total["nvlink_bytes"] + total["network_bytes"],
        **total,
        "wire_over_bound": (total["nvlink_bytes"] + total["network_bytes"]) / bound if bound else 1.0,
        "predicted_seconds": plan.seconds(),
        "full_gather_seconds": max(
            bytes_of["nvlink"] / topology.nvlink_bytes_per_s + bytes_of["network"] / topology.network_bytes_per_s
            for bytes_of in gather
        ),
        "copies": len(plan.copies),
        "ranks": ranks,
    }


def print_explained(console: Console, name: str, title: str, data: dict[str, Any]) -> None:
    """The table of one agent."""
    rows = data["ranks"]
    by_node = len(rows) > MANY
    table = Table(title=f"{name}: {title}", title_justify="left")
    for column in ("node" if by_node else "rank", "local", "NVLink", "network", "lower bound", "full gather"):
        table.add_column(column, justify="right")
    keys = ("local_bytes", "nvlink_bytes", "network_bytes", "lower_bound_bytes", "full_gather_bytes")
    grouped: dict[int, list[int]] = defaultdict(lambda: [0] * len(keys))
    for row in rows:
        sums = grouped[row["node" if by_node else "rank"]]
        for index, key in enumerate(keys):
            sums[index] += row[key]
    for label, sums in grouped.items():
        table.add_row(str(label), *(gigabytes(value) for value in sums))
    table.add_section()
    table.add_row("all", *(gigabytes(data[key]) for key in keys))
    console.print(table)
    less = (
        f"; a full gather moves {data['full_gather_bytes'] / data['wire_bytes']:.1f} times that"
        if data["wire_bytes"]
        else ""
    )
    console.print(
        f"wire {gigabytes(data['wire_bytes'])} GB = {data['wire_over_bound']:.2f} x the lower bound, "
        f"predicted {data['predicted_seconds']:.3g} s{less}, in {data['full_gather_seconds']:.3g} s or more"
    )


def gigabytes(value: float) -> str:
    return f"{value / 1e9:.3f}"
