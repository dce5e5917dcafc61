"""The page: a template filled with styles, scripts and data, so that it asks for nothing from anywhere.

What a model wrote is hostile. As data it stands in script elements that are no scripts, with every "<" escaped, so that
nothing in it can end its element; the page shows it by textContent alone; and the policy in the head runs no script but
those whose hashes it names, and lets none of them fetch anything.
"""

import base64
import hashlib
import html
import json
import re
from collections.abc import Iterable, Mapping
from importlib.resources import files
from typing import Any

SCRIPTS = (
    "elements.js",
    "charts.js",
    "mathematics.js",
    "rollouts.js",
    "time.js",
    "page.js",
)  # one reads those before it
_KATEX = "KaTeX, MIT License, Copyright (c) 2013-2020 Khan Academy and other contributors"

Blocks = Mapping[tuple[int, int], str]  # (number of the run, step) -> base64


def page(title: str, data: Mapping[str, Any], blocks: Blocks, katex: str) -> str:
    """The whole page; ``data`` is what page.js expects of its runs, ``katex`` the source of the library."""
    here = files(__package__ or "megarl.report")
    script = "\n".join((here / name).read_text(encoding="utf-8") for name in SCRIPTS)
    library = f"/* {_KATEX} */\n{katex}"
    parts = {
        "title": html.escape(title),
        "policy": policy(script, library),
        "style": (here / "page.css").read_text(encoding="utf-8"),
        "data": as_json(data),
        "katex": library,
        "script": script,
        "blocks": "\n".join(elements(blocks)),
    }
    template = (here / "page.html").read_text(encoding="utf-8")
    for name in ("katex", "script"):
        assert "</script" not in parts[name].lower(), f"{name} would end its own element"
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], template)  # once: what is put in is not looked at


def policy(*scripts: str) -> str:
    """A content security policy under which these scripts run, and no other, and nothing is fetched."""
    hashes = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()}'" for s in scripts)
    return f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def as_json(value: Any) -> str:
    """JSON that can stand in a script element: no "<" is left to end it or to begin a comment."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def elements(blocks: Blocks) -> Iterable[str]:
    """An element per block; base64 needs no escape."""
    for (run, step), block in blocks.items():
        yield f'<script type="text/plain" id="rollouts-{run}-{step}">{block}</script>'
