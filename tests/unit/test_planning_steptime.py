"""The step-time model: against sums done by hand, and against runs that others published."""

import json
from dataclasses import fields

import numpy as np
import pytest
import yaml

from megarl.config import CONFIG_DIR, compose
from megarl.planning import calibration
from megarl.planning.calibration import held_out, learn, load_rates, misfit, moved, observe, published_observations
from megarl.planning.command import run
from megarl.planning.devices import DEVICES
from megarl.planning.lengths import Lengths
from megarl.planning.memory import Layout
from megarl.planning.models import read_shape
from megarl.planning.published import ROWS
from megarl.planning.steptime import Rates, Turn, Workload, batched, measure_seconds, step_seconds, train_seconds

H100 = DEVICES["h100"]


@pytest.mark.parametrize(("mean", "limit", "spread"), [(400, 4096, 0.7), (3251, 3993, 0.7), (1000, 2048, 0.3)])
def test_lengths_have_the_mean_they_are_given(mean, limit, spread):
    sizes = Lengths(mean, limit, spread).quantile((np.arange(20_000) + 0.5) / 20_000)
    assert sizes.mean() == pytest.approx(mean, rel=2e-3) and sizes.max() <= limit
    assert Lengths(mean, limit, spread).mean_context >= mean / 2


def test_lengths_that_cannot_be():
    with pytest.raises(ValueError, match="mean response of 10 tokens"):
        Lengths(10, 10)


@pytest.mark.parametrize("slots", [1, 3, 100])
def test_batching_decodes_every_token_once(slots):
    sizes = np.array([5.0, 1, 9, 9, 2, 4])
    stretches = batched(sizes, slots)
    assert sum(steps * alive for steps, alive, _ in stretches) == pytest.approx(sizes.sum())
    assert max(alive for _, alive, _ in stretches) <= slots
    if slots == 1:
        assert sum(steps for steps, _, _ in stretches) == sizes.sum()
        assert [generated for _, _, generated in stretches] == pytest.approx(sizes / 2)
    if slots == 100:
        assert [(steps, alive) for steps, alive, _ in stretches] == [(1, 6), (1, 5), (2, 4), (1, 3), (4, 2)]


def test_a_decode_step_by_hand():
    """Llama-3.1-8B, one response, 1,000 tokens before it: 15.0 GB of weights and 0.13 GB of cache, each read once."""
    rates = Rates(
        decode_bandwidth=1.0, decode_compute=1.0, decode_step_s=1e-3, decode_layer_s=1e-5, decode_sequence_s=1e-6
    )
    shape = read_shape("llama-3.1-8b")
    weights = 2 * (8_030_261_248 - 128_256 * 4096)
    cache = 1000 * 2 * 32 * 8 * 128 * 2
    by_hand = 1e-3 + 1e-6 + 32 * 1e-5 + (weights + cache) / 3.35e12
    assert step_seconds(shape, 1, H100, 1, 1000, rates) == pytest.approx(by_hand, rel=1e-3)


def test_a_training_pass_by_hand():
    """6 N D floating-point operations and the causal half of attention, on one GPU at half its data sheet."""
    rates = Rates(train_efficiency=0.5, measure_efficiency=0.5)
    shape = read_shape("llama-3.1-8b")
    turn = Turn(samples=64, distinct_prompts=4, prompt_tokens=0.0, lengths=Lengths(1000, 4000, 1e-3))
    work = Workload(turns=(turn,))
    matrices = 8_030_261_248 - 128_256 * 4096 - 65 * 4096
    operations = 64_000 * (2 * matrices + 4 * 32 * 32 * 128 * 500)
    forward = operations / (989e12 * 0.5)
    assert measure_seconds(shape, Layout(), H100, work, 8000, rates) == pytest.approx(forward, rel=0.01)
    trained = train_seconds(shape, Layout(), H100, work, 8000, "none", rates)
    assert trained == pytest.approx(3 * forward, rel=0.02)
    assert train_seconds(shape, Layout(), H100, work, 8000, "full", rates) == pytest.approx(4 * forward, rel=0.05)
    # eight microbatches on two stages: nine turns of half the work, the head on the last one
    piped = train_seconds(shape, Layout(pp=2), H100, work, 8000, "none", rates)
    assert piped == pytest.approx(3 * forward * 9 / 16, rel=0.1)


def test_published_runs_that_were_not_fitted():
    """The level asked of the model: 20 % in the median, 50 % at worst."""
    median, worst = held_out(load_rates())
    assert median <= 0.20 and worst <= 0.50
    assert sum(row.fitted for row in ROWS) <= len(ROWS) / 2
    fitted = {row.model for row in ROWS if row.fitted}
    assert {row.model for row in ROWS} - fitted == {"llama-3.1-70b"}  # a size that the fit has not seen


def test_the_shipped_rates_are_the_fit():
    """No single rate can be moved by 5 % without a larger misfit, and the priors fit worse."""
    rates, prior, seen = load_rates(), Rates(), published_observations()
    here = misfit(seen, rates, prior)
    assert misfit(seen, prior, prior) > here
    for field in fields(Rates):
        for move in (0.05, -0.05):
            assert misfit(seen, moved(rates, field.name, move), prior) > here - 0.01, (field.name, move)


def test_the_committed_table_is_what_the_command_prints(capsys):
    assert run(["published", "--markdown"]) == 0
    printed = capsys.readouterr().out.splitlines()
    page = (CONFIG_DIR.parent / "megarl" / "planning" / "README.md").read_text(encoding="utf-8")
    assert len(printed) == len(ROWS) + 3
    assert "\n".join(printed[:-1]) in page
    median, worst = held_out(load_rates())
    assert f"median error {median:.1%}".replace("%", " %") in page and f"worst {worst:.1%}".replace("%", " %") in page


def test_rates_matter():
    slow = Rates(train_efficiency=0.1, measure_efficiency=0.1, decode_step_s=0.03)
    assert held_out(slow)[0] > 0.5


@pytest.mark.parametrize(
    "text", ["{}", "no json", '{"rates": {"train_efficiency": 1.0}}'], ids=["empty", "text", "incomplete"]
)
def test_a_file_that_is_no_calibration(tmp_path, text):
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(ValueError, match=r"--rates .*r.json: no calibration file"):
        load_rates(tmp_path / "r.json")


def test_rates_are_learned_from_the_metrics_of_a_run(tmp_path, capsys):
    """A cluster half as fast as the shipped rates say: what is learned says so too."""
    cfg = compose(["+experiment=cohort_7b_8b"])
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(cfg.model_dump(mode="json")))
    lengths = {f"agent/{name}/engine/response_tokens": 700.0 for name in cfg.agents}
    times = {f"agent/{name}/time/{metric}": 1.0 for name in cfg.agents for metric in calibration.METRICS.values()}

    def write(times: dict[str, float]) -> None:
        warm_up = [json.dumps(lengths | dict.fromkeys(times, 1e6))] * calibration.WARM_UP
        (tmp_path / "metrics.jsonl").write_text("\n".join([*warm_up, *[json.dumps(lengths | times)] * 3]) + "\n")

    write(times)
    seen = {
        f"agent/{name}/time/{metric}": 2 * observation.predict(load_rates())[phase]
        for name, observation in zip(cfg.agents, observe(tmp_path, H100), strict=True)
        for phase, metric in calibration.METRICS.items()
    }
    write(seen)
    learn([tmp_path], H100, tmp_path / "ours.json")
    assert "median error over 8 phase times before: 50%" in capsys.readouterr().out
    learned, shipped = load_rates(tmp_path / "ours.json"), load_rates()
    assert learned.train_efficiency == pytest.approx(shipped.train_efficiency / 2, rel=0.25)
    for observation in observe(tmp_path, H100):
        assert observation.predict(learned)["train"] == pytest.approx(observation.seconds["train"], rel=0.15)


def test_a_folder_without_a_run(tmp_path):
    with pytest.raises(ValueError, match="no run there"):
        observe(tmp_path, H100)
