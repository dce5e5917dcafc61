"""Policies on real ranks, and tiny models made once."""

from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.backends.megatron.policy import MegatronPolicy
from megarl.settings import AgentConfig, LayoutConfig, OptimizerConfig
from tests import tiny
from tests.megatron.ranks import LocalRanks

TOKENS = 128  # per microbatch


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {family: tiny.write(root / family, family) for family in tiny.FAMILIES}


Open = Callable[..., tuple[MegatronPolicy, LocalRanks]]


@pytest.fixture
def policy(request: pytest.FixtureRequest) -> Open:
    """``policy(model_dir, layout, ...)`` -> a policy on real ranks, closed by the next one or at the test's end."""
    opened: list[LocalRanks] = []

    def close() -> None:
        while opened:
            opened.pop().close()

    def make(
        model: Path,
        layout: LayoutConfig | None = None,
        *,
        optimizer: OptimizerConfig | None = None,
        temperature: float = 0.7,
        tokens: int = TOKENS,
        dtype: str = "float32",
        **kwargs: object,
    ) -> tuple[MegatronPolicy, LocalRanks]:
        close()
        agent = AgentConfig(
            model=str(model),
            dtype=dtype,
            layout=layout or LayoutConfig(),
            optimizer=optimizer or OptimizerConfig(name="sgd", lr=0.02),
        )
        ranks = LocalRanks(agent=agent, temperature=temperature, **kwargs)
        opened.append(ranks)
        return MegatronPolicy(agent, ranks, tokens_per_microbatch=tokens), ranks

    request.addfinalizer(close)
    return make
