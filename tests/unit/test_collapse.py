"""Signs of collapse: turns and bounds by hand, and what is told when."""

import numpy as np
import pytest

from megarl.collapse import new_signs, sign, signs
from megarl.guard_settings import GuardConfig, TurnConfig

TURN = TurnConfig(rise=0.5, fall=0.5)


@pytest.mark.parametrize(
    ("series", "smooth", "found"),
    [
        ([1, 2, 3, 2, 1], 1, "rose from 1 to 3 and fell to 1"),
        ([1, 2, 3, 2], 1, None),  # fell by a third of the peak
        ([2, 3, 1], 1, None),  # rose by a third
        ([1, 2, 3, 4, 5], 1, None),  # still rising
        ([5, 4, 3, 2, 1], 1, None),  # never rose
        ([1, 5, 1], 1, "rose from 1 to 5 and fell to 1"),
        # means of three: 7/3, 3, 3, 7/3: the spike is no turn
        ([1, 1, 5, 3, 1, 3], 3, None),
        # means of two: 1, 3, 4, 2: 3/4 and 2/4 of the peak
        ([0, 2, 4, 4, 0], 2, "rose from 1 to 4 and fell to 2"),
        ([1, 3], 1, None),  # too short to turn
        ([1, 9, np.nan, 1], 1, "rose from 1 to 9 and fell to 1"),
        ([0, 0, 0], 1, None),
        ([], 1, None),
    ],
)
def test_turns(series, smooth, found):
    assert sign(series, TURN, smooth) == found


def test_bounds_need_no_turn():
    bounded = TurnConfig(least=0.1, most=10)
    assert sign([1, 1, 1], bounded, 1) is None
    assert sign([1, 1, 0.05], bounded, 1) == "is 0.05, below 0.1"
    assert sign([1, 1, 12], bounded, 1) == "is 12, above 10"
    assert sign([1, 0.1, 0.1], bounded, 1) != "is 0.1, below 0.1"


def rows(**series):
    """One row per step of agents' metrics: a_vote_margin=[...]"""
    names = {
        "vote_margin": "label/vote_margin",
        "entropy": "policy/entropy",
        "response_tokens": "engine/response_tokens",
        "reward_spread": "reward/reward_spread",
    }
    keys = {key: f"agent/{key.partition('_')[0]}/{names[key.partition('_')[2]]}" for key in series}
    steps = max(len(of) for of in series.values())
    return [{keys[k]: float(of[i]) for k, of in series.items() if i < len(of)} for i in range(steps)]


def test_every_watched_metric_of_every_agent():
    cfg = GuardConfig(smooth=1, window=5, entropy=None)
    turn, flat = [1, 2, 1], [1, 1, 1]
    seen = rows(
        a_vote_margin=turn, a_entropy=turn, a_response_tokens=flat, b_reward_spread=turn, b_response_tokens=turn
    )
    assert list(signs(seen, ("a", "b"), cfg)) == [
        *("agent/a/label/vote_margin", "agent/b/engine/response_tokens", "agent/b/reward/reward_spread")
    ]
    assert signs(seen, ("c",), cfg) == {} and signs([], ("a",), cfg) == {}


def test_a_turn_is_told_once_and_forgotten_with_the_window():
    cfg = GuardConfig(smooth=1, window=4)
    seen = rows(a_entropy=[1, 2, 1, 1, 1, 1, 1])
    told = [new_signs(seen[: i + 1], ("a",), cfg) for i in range(len(seen))]
    assert [len(t) for t in told] == [0, 0, 1, 0, 0, 0, 0]
    assert told[2] == ["agent/a/policy/entropy rose from 1 to 2 and fell to 1"]
    shown = [bool(signs(seen[: i + 1], ("a",), cfg)) for i in range(len(seen))]
    assert shown == [False, False, True, True, False, False, False]  # of the last four, the rise has gone at step 4
    # rows beyond the window change nothing: a history cut to it judges alike
    for i in range(len(seen)):
        assert new_signs(seen[max(0, i - cfg.window) : i + 1], ("a",), cfg) == told[i]


def test_healthy_and_collapsing_courses():
    """Learning that settles, with the noise of a vote of 64 prompts, shows nothing; a consensus that breaks does."""
    random, cfg = np.random.default_rng(0), GuardConfig()
    steps = np.arange(100)
    noise = random.normal(0, 0.02, 100)
    healthy = rows(a_vote_margin=1 - 0.5 * np.exp(-steps / 20) + noise, a_entropy=0.2 + np.exp(-steps / 20) + noise)
    assert not any(signs(healthy[: i + 1], ("a",), cfg) for i in range(100))
    broken = rows(a_vote_margin=0.5 + 0.4 * np.sin(np.pi * np.minimum(steps, 60) / 45).clip(-1) + noise)
    first = next(i for i in range(100) if signs(broken[: i + 1], ("a",), cfg))
    assert 25 < first < 45  # the peak is at 22


def test_a_window_too_short_for_a_turn_is_refused():
    with pytest.raises(ValueError, match=r"guard.window=6 is too short for guard.smooth=5.*at least 7"):
        GuardConfig(window=6)
