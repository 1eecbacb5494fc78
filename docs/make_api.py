"""Write signatures and first lines into docs/reference/api.md, so that it reads without being built.

    python docs/make_api.py

Under every block of directives there is a list of what the block names; a test keeps it current.
"""

from __future__ import annotations

import importlib
import inspect
import operator
import re
from pathlib import Path

import fald

PAGE = Path(__file__).parent / "reference" / "api.md"
_BLOCK = re.compile(r"```\{eval-rst\}\n(.*?)```\n(?:\n<!-- generated -->\n.*?<!-- end -->\n)?", re.DOTALL)
_MOST = 300  # characters of a signature


def page(text: str) -> str:
    """The page with its lists made anew."""

    def block(found: re.Match[str]) -> str:
        lines = [_line(name, thing) for name, thing in _named(found[1])]
        listed = "\n<!-- generated -->\n" + "\n".join(lines) + "\n<!-- end -->\n" if lines else ""
        return f"```{{eval-rst}}\n{found[1]}```\n{listed}"

    return _BLOCK.sub(block, text)


def _named(directives: str) -> list[tuple[str, object]]:
    """What a block of directives documents: names and things."""
    found = []
    for kind, name, options in re.findall(r"\.\. auto(\w+):: (\S+)\n((?:   :.*\n)*)", directives):
        if kind != "module":
            found.append((name, _thing(name)))
            continue
        module = _thing(name)
        members = re.search(r":members:(.*)", options)
        listed = [m.strip() for m in (members[1] if members else "").split(",") if m.strip()]
        own = [n for n, v in vars(module).items() if getattr(v, "__module__", "") == module.__name__]  # type: ignore[attr-defined]
        for member in listed or [n for n in own if not n.startswith("_")]:
            found.append((f"{name}.{member}", getattr(module, member)))
    return found


def _thing(name: str) -> object:
    try:
        return operator.attrgetter(name.removeprefix("fald."))(fald)
    except AttributeError:
        room, _, last = name.rpartition(".")
        try:
            return getattr(importlib.import_module(room), last)
        except (ImportError, AttributeError):
            return importlib.import_module(name)


def _line(name: str, thing: object) -> str:
    first = (inspect.getdoc(thing) or "").split("\n")[0]
    if not callable(thing):
        return f"- `{name}`"
    try:
        parameters = inspect.signature(thing).parameters.values()
    except (TypeError, ValueError):
        return f"- `{name}`: {first}"
    shown, starred = [], False
    for p in parameters:
        if p.kind is p.KEYWORD_ONLY and not starred:
            shown, starred = [*shown, "*"], True
        mark = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
        starred = starred or p.kind is p.VAR_POSITIONAL
        simple = isinstance(p.default, str | int | float | None)
        given = "" if p.default is p.empty else f"={p.default!r}" if simple else "=…"
        shown.append(f"{mark}{p.name}{given}")
    signature = ", ".join(shown)
    signature = signature if len(signature) <= _MOST else signature[:_MOST].rsplit(", ", 1)[0] + ", …"
    return f"- `{name}({signature})`: {first}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
