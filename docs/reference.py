"""Write docs/configuration.md from the models that check a run: ``make docs``.

Keys, types, bounds, defaults and descriptions are those of ``megarl.config.RunConfig``; nothing stands here but the
words around the tables.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from megarl.config import RunConfig

PAGE = Path(__file__).with_name("configuration.md")
HEAD = """\
# Configuration

<!-- written by `make docs` from megarl/config.py and the sections it imports; change those -->

Every key of a run. A YAML file says only what differs from the defaults below. `key=value` on the command line sets any
key, whether or not a file mentions it. An unknown key or a value that does not fit is refused before anything starts,
and the nearest key is named. `--cfg job` prints a run as it resolves:

```bash
$(make -s python) -m megarl train +experiment=cohort_7b_8b agents.qwen.optimizer.lr=2e-6 --cfg job
```

`+experiment=NAME` and `+recipe=NAME` take files of `configs/experiment/` and `configs/recipe/`; `--config-dir DIR` adds
a folder of your own with folders of these names. On the command line a map or a list is written as YAML, in quotes:
`'agents.qwen.layout={tp: 2, dp: 4}'`. X is a name of your choice.
"""
WORDS = {str: "text", int: "integer", float: "number", bool: "true, false", NoneType: "null", Any: "anything"}
SIGNS = {"Ge": "≥", "Gt": ">", "Le": "≤", "Lt": "<"}


def page() -> str:
    """The whole page."""
    return "\n".join([HEAD, *_section("", RunConfig, {})])


def _section(path: str, model: type[BaseModel], known: dict[type[BaseModel], str]) -> Iterator[str]:
    """A model's table, then those of the models in it; ``known`` maps models that had theirs to its heading."""
    known[model] = path
    yield f"## `{path}`\n" if path else "## The run\n"
    if path and (about := _about(model)):
        yield about.replace("<", "&lt;") + "\n"
    below: list[tuple[str, type[BaseModel]]] = []
    rows = [
        _row(f"{path}.{name}" if path else name, field, known, below)
        for name, field in model.model_fields.items()
        if not _is_tag(field)
    ]
    yield "\n".join(["| key | type | default | |\n|---|---|---|---|", *rows, ""]) if rows else "No settings.\n"
    for heading, part in below:
        yield from _section(heading, part, known)


def _row(
    key: str, field: FieldInfo, known: dict[type[BaseModel], str], below: list[tuple[str, type[BaseModel]]]
) -> str:
    """One line; models that have no table yet are put ``below``."""
    about = field.description or ""
    for part in _models(field.annotation):
        heading = f"{key}.name={part.model_fields['name'].default}" if field.discriminator else key
        heading += ".X" if get_origin(field.annotation) is dict else ""
        if part not in known:
            known[part] = heading
            below.append((heading, part))
        elif not field.discriminator:
            about += f" (keys as in `{known[part]}`)"
        about = about or _about(part)
    key = re.sub(r"^algo\.name=\w+", "algo", key)
    cells = (f"`{key}`", _kind(field), _default(field), about.replace("<", "&lt;"))
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _is_tag(field: FieldInfo) -> bool:
    """The name by which a method is chosen; the heading has it."""
    return get_origin(field.annotation) is Literal and len(get_args(field.annotation)) == 1


def _about(model: type[BaseModel]) -> str:
    """The first paragraph of the model's own docstring."""
    text = vars(model).get("__doc__") or ""
    return " ".join(text.split("\n\n")[0].replace("``", "`").split())


def _models(kind: Any) -> list[type[BaseModel]]:
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return [kind]
    return [] if get_origin(kind) is Literal else [model for part in get_args(kind) for model in _models(part)]


def _kind(field: FieldInfo) -> str:
    text = "one of the methods below" if field.discriminator else _spelled(field.annotation)
    return ", ".join([text, *_bounds(field.metadata)])


def _bounds(rules: list[Any]) -> list[str]:
    signs = [f"{SIGNS[type(rule).__name__]} {_number(rule)}" for rule in rules if type(rule).__name__ in SIGNS]
    patterns = [f"`{rule.pattern}`" for rule in rules if getattr(rule, "pattern", None)]
    return signs + patterns


def _number(rule: Any) -> str:
    return f"{getattr(rule, type(rule).__name__.lower()):g}"


def _spelled(kind: Any) -> str:
    """A type in words."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Literal:
        return ", ".join(f"`{part}`" for part in parts)
    if origin is Annotated:
        field = next((part for part in parts[1:] if isinstance(part, FieldInfo)), None)
        return ", ".join([_spelled(parts[0]), *_bounds(field.metadata if field else [])])
    if origin is dict:
        return f"map of {_spelled(parts[1])}"
    if origin is tuple:
        return f"list of {_spelled(parts[0])}" if parts[-1] is ... else f"list of {len(parts)}: {_spelled(parts[0])}"
    if parts:
        return " or ".join(_spelled(part) for part in parts)
    return WORDS.get(kind, "section")


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    if isinstance(field.default, BaseModel) or any(isinstance(v, BaseModel) for v in _values(field.default)):
        return "those below"
    text = json.dumps(field.default, ensure_ascii=False)
    return f"`{text}`" if len(text) <= 60 else f"`{text[:56]}...`"


def _values(default: Any) -> list[Any]:
    return list(default.values()) if isinstance(default, dict) else []


if __name__ == "__main__":
    PAGE.write_text(page())
    print(PAGE)
