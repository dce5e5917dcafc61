"""The tiny models, and the backends opened on them."""

from contextlib import ExitStack

import pytest
import torch

from tests import tiny
from tests.contracts import backends

FAMILIES = ("qwen3", "llama")  # tied and untied


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Bitwise comparisons want it, and on a busy machine waiting threads cost more than they give."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session", params=FAMILIES)
def model(request, tmp_path_factory):
    """A tiny model's directory whose samples are varied: some end by either stop id, some are cut."""
    return tiny.write(tmp_path_factory.mktemp("model") / request.param, request.param, scale=2.0)


@pytest.fixture(params=backends.POLICIES)
def open_policy(request, model):
    """Opens policies of the backend on the model: ``open_policy(temperature=1.0, ..., agent={...})``."""
    with ExitStack() as stack:

        def build(agent=None, **args):
            return stack.enter_context(
                backends.POLICIES[request.param](backends.agent_of(model, **(agent or {})), backends.PolicyArgs(**args))
            )

        yield build


@pytest.fixture(scope="module", params=backends.SAMPLERS)
def sampler_name(request):
    return request.param


@pytest.fixture(scope="module")
def engine(sampler_name, model):
    """One engine for a whole file, because engines are slow to start; each test refits what it needs."""
    with backends.SAMPLERS[sampler_name](backends.agent_of(model), backends.chat_of(model)) as opened:
        yield opened


@pytest.fixture
def fitted(engine, model):
    """The engine, awake, with the model's own weights."""
    backends.refit(engine, backends.named_weights(backends.oracle(model)))
    engine.wake()
    return engine


@pytest.fixture
def open_engine(sampler_name, model):
    """Opens a fresh engine of the backend: for what cannot be seen on one that was used."""
    with ExitStack() as stack:

        def build(path=model, **agent):
            return stack.enter_context(
                backends.SAMPLERS[sampler_name](backends.agent_of(path, **agent), backends.chat_of(path))
            )

        yield build
