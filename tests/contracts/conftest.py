"""The tiny models, and the backends opened on them."""

from contextlib import ExitStack

import pytest
import torch

from tests import tiny
from tests.contracts.backends import (
    MODEL,
    POLICIES,
    SAMPLERS,
    Host,
    PolicyArgs,
    agent_of,
    chat_of,
    named_weights,
    oracle,
    refit,
)


def pytest_generate_tests(metafunc):
    """Every backend on each of its families; where a test wants a policy and an engine, every pair of them."""
    rows = [
        {"family": family, "policy_name": policy, "sampler_name": sampler}
        for family in ("qwen3", "llama")
        for policy in (
            [p for p in POLICIES if family in POLICIES[p].families] if _wants(metafunc, "policy_name") else [""]
        )
        for sampler in (
            [s for s in SAMPLERS if family in SAMPLERS[s].families] if _wants(metafunc, "sampler_name") else [""]
        )
    ]
    names = [n for n in ("family", "policy_name", "sampler_name") if _wants(metafunc, n)]
    if names:
        cases = [tuple(row[n] for n in names) for row in rows]
        metafunc.parametrize(names, cases, ids=["-".join(c) for c in cases], scope="session")


def _wants(metafunc, name):
    return name in metafunc.fixturenames


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Bitwise comparisons want it, and on a busy machine waiting threads cost more than they give."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def model(family, tmp_path_factory):
    """A tiny model's directory whose samples are varied: some end by either stop id, some are cut."""
    return tiny.write(tmp_path_factory.mktemp("model") / family, family, **MODEL)


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    opened = Host(tmp_path_factory.mktemp("run"))
    yield opened
    opened.close()


@pytest.fixture
def open_policy(policy_name, model, host):
    """Opens policies of the backend on the model: ``open_policy(temperature=1.0, ..., agent={...})``."""
    with ExitStack() as stack:

        def build(agent=None, **args):
            config = agent_of(model, **(agent or {}))
            return stack.enter_context(POLICIES[policy_name].open(config, PolicyArgs(**args), host))

        yield build


@pytest.fixture(scope="module")
def engine(sampler_name, model, host):
    """One engine for a whole file, because engines are slow to start; each test refits what it needs."""
    with SAMPLERS[sampler_name].open(agent_of(model), chat_of(model), host) as opened:
        yield opened


@pytest.fixture(scope="module")
def narrow(sampler_name, model, host):
    """Another engine, with few places and a stream of its own."""
    agent = agent_of(model, seed=5, engine={"max_sequences": 5})
    with SAMPLERS[sampler_name].open(agent, chat_of(model), host) as opened:
        yield opened


@pytest.fixture
def fitted(engine, model):
    """The engine, awake, with the model's own weights."""
    refit(engine, named_weights(oracle(model)))
    engine.wake()
    return engine


@pytest.fixture
def open_engine(sampler_name, model, host):
    """Opens a fresh engine of the backend: for what cannot be seen on one that was used."""
    with ExitStack() as stack:

        def build(path=model, **agent):
            return stack.enter_context(SAMPLERS[sampler_name].open(agent_of(path, **agent), chat_of(path), host))

        yield build
