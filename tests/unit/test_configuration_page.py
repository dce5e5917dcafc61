"""docs/configuration.md says what the models say, about every key."""

import importlib.util
import re
from pathlib import Path

import pytest

from megarl.config import RunConfig

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def reference():
    spec = importlib.util.spec_from_file_location("reference", DOCS / "reference.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_up_to_date(reference):
    assert reference.PAGE.read_text() == reference.page(), "run `make docs`"


def test_every_key_is_described(reference):
    rows = re.findall(r"^\| `(\S+)` \|.*\| (.*) \|$", reference.page(), re.M)
    assert len(rows) > 120
    assert [key for key, about in rows if not about.strip()] == []
    keys = {key for key, _ in rows}
    assert set(RunConfig.model_fields) <= keys
    assert {"agents.X.optimizer.schedule.warmup", "data.views.X.after", "algo.requests.verify", "guard.window"} <= keys


def test_a_field_without_a_description_shows(reference):
    """The control of the test above."""
    from megarl.settings import Section

    class Silent(Section):
        key: int = 1

    assert reference._row("a.key", Silent.model_fields["key"], {}, []) == "| `a.key` | integer | `1` |  |"
