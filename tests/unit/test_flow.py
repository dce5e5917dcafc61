"""The two-answer task: the project's own labels, rewards, advantages and loss follow the predicted flow."""

import numpy as np
import pytest

from megarl.algos.controls import RandomReward
from megarl.algos.corl import CoRL
from megarl.algos.ttrl import TTRL
from megarl.demo import flow

RUN = flow.Run(prompts=32, lr=0.8, steps=30)
CORL = CoRL(ring=flow.AGENTS)
MUTUAL, ALONE = (1, 0), (0, 1)  # who teaches whom


@pytest.mark.parametrize(
    ("start", "end"),
    [((0.2, 0.9), 1), ((0.8, 0.35), 1), ((0.3, 0.6), 0), ((0.6, 0.15), 0)],
)
def test_a_co_rl_pair_ends_right_where_its_probabilities_sum_to_more_than_one(start, end):
    path = flow.simulated(CORL, start, RUN)
    assert np.abs(path[-1] - end).max() < 0.1
    assert np.abs(path - flow.predicted(start, RUN, MUTUAL)).max() < 0.1


def test_ttrl_ends_where_each_began_above_or_below_one_half():
    """The same starts that Co-RL resolves together: one right, one wrong."""
    for start, ends in (((0.2, 0.9), (0, 1)), ((0.6, 0.3), (1, 0))):
        path = flow.simulated(TTRL(), start, RUN)
        assert np.abs(path[-1] - ends).max() < 0.1
        assert np.abs(path - flow.predicted(start, RUN, ALONE)).max() < 0.1
        # negative control: it does not follow the other method's flow
        assert np.abs(path - flow.predicted(start, RUN, MUTUAL)).max() > 0.5


def test_random_rewards_lead_nowhere():
    path = flow.simulated(RandomReward(), (0.3, 0.6), RUN)
    assert np.abs(path - path[0]).max() < 0.25
    assert np.ptp(path[:, 0]) > 0, "it did train"


def test_picture_and_table(tmp_path, capsys):
    flow.main([str(tmp_path / "sub" / "flow.png"), "--prompts", "2", "--steps", "2"])
    assert (tmp_path / "sub" / "flow.png").read_bytes().startswith(b"\x89PNG")
    rows = capsys.readouterr().out.splitlines()[1:-1]
    assert [row.split()[0] for row in rows] == ["Co-RL"] * 6 + ["TTRL"] * 6
