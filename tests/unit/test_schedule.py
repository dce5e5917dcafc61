import pytest

from megarl.schedule import learning_rate
from megarl.settings import OptimizerConfig, ScheduleConfig


def optimizer(lr, **schedule):
    return OptimizerConfig(lr=lr, schedule=ScheduleConfig(**schedule))


@pytest.mark.parametrize(("index", "rate"), [(3, 2.142857e-7), (7, 5e-7), (117, 2.621049e-7), (234, 0.0)])
def test_v32_coverrl(index, rate):
    cfg = optimizer(5e-7, decay="cosine", warmup=0.03)
    assert learning_rate(cfg, index, 234) == pytest.approx(rate, abs=1e-13)
    assert learning_rate(optimizer(5e-7, decay="cosine", warmup=7), index, 234) == learning_rate(cfg, index, 234)


@pytest.mark.parametrize(("index", "rate"), [(3, 3e-6), (50, 1.715559e-6), (100, 3e-7), (200, 3e-7)])
def test_v32_cosine_to_a_tenth(index, rate):
    cfg = optimizer(3e-6, decay="cosine", warmup=3, min_ratio=0.1)
    assert learning_rate(cfg, index, 100) == pytest.approx(rate, rel=1e-6)


def test_case_e3_linear():
    cfg = optimizer(1e-6, decay="linear")
    assert learning_rate(cfg, 0, 20) == 1e-6
    assert learning_rate(cfg, 10, 20) == pytest.approx(5e-7)
    assert learning_rate(cfg, 11, 20) == pytest.approx(4.5e-7)
    assert learning_rate(cfg, 20, 20) == 0


def test_constant():
    cfg = optimizer(1e-6, warmup=4)
    assert [learning_rate(cfg, i, 10) for i in (0, 1, 4, 9, 50)] == [0, 2.5e-7, 1e-6, 1e-6, 1e-6]


def test_errors():
    with pytest.raises(ValueError, match=r"warmup=2\.0.*below 1"):
        optimizer(1e-6, warmup=2.0)
    with pytest.raises(ValueError, match="index=-1"):
        learning_rate(optimizer(1e-6), -1, 10)
