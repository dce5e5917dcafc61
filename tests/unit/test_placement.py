"""Who sits on which node: the plan, without Ray."""

import pytest

from megarl.backends.cluster import Node
from megarl.backends.placement import plan_groups, plan_nodes

A, B = Node("a" * 8, "10.0.0.1", 8), Node("b" * 8, "10.0.0.2", 8)


def test_every_agent_that_fits_sits_in_one_node():
    plan = plan_nodes({A: 8, B: 8}, {"small": 2, "large": 8, "middle": 6}, {"large": 4})
    assert plan == {"small": [(B, 2)], "large": [(A, 8)], "middle": [(B, 6)]}
    assert list(plan) == ["small", "large", "middle"]


def test_the_order_of_small_agents_does_not_split_a_large_one():
    plan = plan_nodes({A: 2, B: 2}, {"x": 1, "y": 1, "z": 2}, {})
    assert plan["z"] == [(A, 2)]
    assert plan["x"] == plan["y"] == [(B, 1)]


def test_a_larger_agent_is_cut_between_tensor_parallel_groups():
    assert plan_nodes({A: 8, B: 8}, {"big": 12}, {"big": 4}) == {"big": [(A, 8), (B, 4)]}
    assert plan_nodes({A: 6, B: 6}, {"big": 8}, {"big": 4}) == {"big": [(A, 4), (B, 4)]}


def test_tensor_parallelism_across_nodes_is_refused():
    with pytest.raises(ValueError, match=r"agent big: its tensor-parallel groups want 16 slots in one node.* 8 free"):
        plan_nodes({A: 8, B: 8}, {"big": 16}, {"big": 16})


def test_wanted_against_available_is_told_per_node():
    with pytest.raises(ValueError) as caught:
        plan_nodes({A: 8, B: 4}, {"one": 8, "two": 6}, {"two": 2})
    assert "agent two: 6 slots wanted (in runs of 2 per node)" in str(caught.value)
    assert "wanted 14 slots (one 8, two 6)" in str(caught.value)
    assert "available 12 (10.0.0.1/aaaaaa 8, 10.0.0.2/bbbbbb 4)" in str(caught.value)


def test_free_slots_that_no_tensor_parallel_group_can_use():
    with pytest.raises(ValueError, match="agent big: 4 slots wanted"):
        plan_nodes({A: 3, B: 3}, {"big": 4}, {"big": 3})


def test_no_node():
    with pytest.raises(ValueError, match="available 0 \\(no node\\)"):
        plan_nodes({}, {"one": 1}, {})


def test_cuts_suit_policy_and_engine():
    """Policy TP 4 and engine TP 3: an engine group would lie across a cut at 8."""
    with pytest.raises(ValueError, match=r"agent big: its tensor-parallel groups want 12 slots in one node.* 8 free"):
        plan_nodes({A: 8, B: 8}, {"big": 12}, {"big": 12})
    twelve = {Node("c" * 8, "10.0.0.3", 12): 12, Node("d" * 8, "10.0.0.4", 12): 12}
    assert [size for _, size in plan_nodes(twelve, {"big": 24}, {"big": 12})["big"]] == [12, 12]
    assert plan_nodes({A: 8, B: 8}, {"whole": 8}, {"whole": 12}) == {"whole": [(A, 8)]}


def test_a_group_of_nodes_is_its_agents_alone() -> None:
    """The agent that would choose first sits on the small nodes, because it was told to."""
    big, small = Node("1" * 32, "a", 8, "big"), [Node(str(n) * 32, "b", 2, "small") for n in (2, 3)]
    free = {big: 8, small[0]: 2, small[1]: 2}
    plan = plan_groups(free, {"x": 4, "y": 2}, {"x": 2, "y": 1}, {"small": ["x"], "big": ["y"]})
    assert plan == {"x": [(small[0], 2), (small[1], 2)], "y": [(big, 2)]}
    with pytest.raises(ValueError, match="group small of nodes: agent x: 6 slots wanted"):
        plan_groups(free, {"x": 6, "y": 2}, {"x": 2, "y": 1}, {"small": ["x"], "big": ["y"]})
    with pytest.raises(ValueError, match=r"group huge of nodes: agent x: .*available 0 \(no node\)"):
        plan_groups(free, {"x": 1}, {"x": 1}, {"huge": ["x"]})
