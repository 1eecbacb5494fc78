"""Reference text taken from the code while the pages are built, so that it cannot go stale.

The study keys come from the pydantic models, the help from the commands. Types and defaults are the code's;
only the meaning of a key is written, in ``reference.toml``. A key without a meaning, or a meaning without a
key, stops the build. The table of the paper's statements comes from ``statements.toml``. Formulas become
MathML, so that the pages need no network.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

STATEMENTS = tomllib.loads(Path(__file__).with_name("statements.toml").read_text(encoding="utf-8"))
WRITTEN = tomllib.loads(Path(__file__).with_name("reference.toml").read_text(encoding="utf-8"))
MEANINGS, INTRODUCTIONS, REMARKS = (WRITTEN[part] for part in ("keys", "introductions", "remarks"))

# Written into study.json by the program; not a key of the study file.
_INTERNAL = {"folder"}

_WORDS = {
    "string": "text",
    "number": "number",
    "integer": "whole number",
    "boolean": "true or false",
    "null": "",
}

_TITLES = {"": "Top level", "sampler.step-size": "step-size as a table"}

# Tables inside a section, by the name of their pydantic model.
_INNER = {"Scale": "data.scaling", "Scales": "model.scales", "Decay": "sampler.step-size"}


def sections() -> dict[str, dict[str, Any]]:
    """Section of the study file -> JSON schema of its keys; ``""`` is the top level."""
    from fald.study.schema import Study

    schema = Study.model_json_schema(by_alias=True)
    parts = schema["$defs"]
    found = {"": schema}
    for key, rule in schema["properties"].items():
        references = [r["$ref"] for r in [rule, *rule.get("anyOf", ())] if "$ref" in r]
        if references:
            found[key] = parts[references[0].rsplit("/", 1)[-1]]
            inner = {_INNER[n]: parts[n] for n in parts if _INNER.get(n, "").startswith(f"{key}.")}
            found |= dict(sorted(inner.items()))
    missing = sorted(set(parts) - {part["title"] for part in found.values()})
    if missing:
        raise ValueError(
            f"docs/_ext/generated_reference.py does not know the tables {missing} of the study file"
        )
    return found


def study_keys(section: str) -> str:
    """A Markdown table of the keys of one section; ``""`` is the top level."""
    schema, meanings = sections()[section], MEANINGS.get(section, {})
    keys = {k: v for k, v in schema["properties"].items() if section or k not in _INTERNAL}
    if set(keys) != set(meanings):
        without, unused = sorted(set(keys) - set(meanings)), sorted(set(meanings) - set(keys))
        raise ValueError(
            f"docs/_ext/reference.toml, section {section!r}: no meaning for {without}, no key for {unused}"
        )
    lines = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for key, rule in keys.items():
        default = "*needed*" if key in schema.get("required", ()) else _default(rule)
        meaning = " ".join(meanings[key].split())
        lines.append(f"| `{key}` | {_type(rule)} | {default} | {meaning} |")
    return "\n".join(lines)


def _default(rule: dict[str, Any]) -> str:
    value = rule.get("default")
    if value is None or value == "":
        return "—"
    return f"`{str(value).lower()}`" if isinstance(value, bool) else f"`{value}`"


def _type(rule: dict[str, Any]) -> str:
    if "anyOf" in rule:
        return " or ".join(t for t in map(_type, rule["anyOf"]) if t)
    if "$ref" in rule:
        return "table"
    if "enum" in rule:
        return ", ".join(f"`{value}`" for value in rule["enum"])
    kind = rule.get("type")
    if "prefixItems" in rule:
        return f"list of {len(rule['prefixItems'])} numbers"
    if kind == "array":
        inner = _type(rule["items"])
        return f"list of ({inner})" if "anyOf" in rule["items"] else f"list of {inner}"
    if kind == "object":
        if rule["additionalProperties"] is True:
            return "table"
        inner = _type(rule["additionalProperties"])
        return "table of tables" if inner == "table" else f"table of {inner}"
    limits = {"exclusiveMinimum": ">", "minimum": "≥", "exclusiveMaximum": "<", "maximum": "≤"}
    bounds = [f"{sign} {_bound(rule[name])}" for name, sign in limits.items() if name in rule]
    return " ".join([_WORDS[kind or "null"], ", ".join(bounds)]).strip()


def _bound(value: float) -> str:
    return "2⁶³" if value == 2**63 else f"{value:g}"


def command_names() -> list[str]:
    """The commands of ``fald``, in the order its help lists them; those of a group after its name."""
    from fald.cli.main import app

    names = [info.name or info.callback.__name__ for info in app.registered_commands]
    for group in app.registered_groups:
        inner = group.typer_instance
        names.append(inner.info.name)
        names += [f"{inner.info.name} {c.name or c.callback.__name__}" for c in inner.registered_commands]
    return names


def command_help(name: str) -> str:
    """The help text of ``fald NAME``, or of ``fald`` itself for ``""``."""
    from typer.testing import CliRunner

    from fald.cli.main import app

    arguments = [*name.split(), "--help"]
    result = CliRunner().invoke(app, arguments, prog_name="fald", terminal_width=88)
    if result.exit_code != 0:
        raise ValueError(f"fald {name} --help ended with {result.exit_code}: {result.output}")
    return result.output.rstrip()


VERDICTS = ("holds as printed", "holds with a correction", "does not hold")
_KINDS = {
    "theorem": "Theorems",
    "lemma": "Lemmas",
    "definition": "Definitions",
    "assumption": "Assumptions",
    "algorithm": "Algorithms",
    "figure": "Figures",
    "formula": "Formulas without a number",
}


def statements(kind: str) -> str:
    """A Markdown table of the paper's statements of one kind."""
    lines = ["| number | about | in fald | verdict |", "|---|---|---|---|"]
    for row in STATEMENTS["statement"]:
        if row["verdict"] not in VERDICTS or row["kind"] not in _KINDS:
            raise ValueError(f"docs/_ext/statements.toml: unknown verdict or kind in {row}")
        if row["kind"] == kind:
            remark = f"; {row['remark']}" if "remark" in row else ""
            where = ", ".join(f"`{name}`" for name in row["where"])
            lines.append(f"| {row['number']} | {row['about']} | {where} | **{row['verdict']}**{remark} |")
    return "\n".join(lines)


def show_equations(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Set the indented equations of docstrings as they are written, instead of as quotations."""
    shown: list[str] = []
    for line in lines:
        before = [earlier for earlier in shown if earlier.strip()][-1:]
        starts_block = line.startswith("  ") and shown and not shown[-1].strip()
        if starts_block and before and not before[0].startswith(" ") and before[0] != "::":
            shown += ["::", ""]
        shown.append(line)
    lines[:] = shown


def setup(app: Any) -> dict[str, Any]:
    """Register the directives, the way docstrings are shown, and the way formulas are set."""
    from docutils import nodes
    from docutils.utils.math.latex2mathml import tex2mathml
    from sphinx.util.docutils import SphinxDirective

    def section(name: str, title: nodes.Node, *content: nodes.Node) -> nodes.section:
        names = [nodes.fully_normalize_name(name)]
        return nodes.section("", title, *content, ids=[nodes.make_id(name)], names=names)

    class StudyKeys(SphinxDirective):
        def run(self):
            made = []
            for name in sections():
                label = _TITLES.get(name, f"[{name}]")
                text = f"{INTRODUCTIONS.get(name, '')}\n\n{study_keys(name)}"
                table = self.parse_text_to_nodes(text)
                made.append(section(f"keys {name}", nodes.title(label, label), *table))
            return made

    class Commands(SphinxDirective):
        def run(self):
            made = []
            for name in ["", *command_names()]:
                label = f"fald {name}".strip()
                text = f"$ {label} --help\n{command_help(name)}"
                remark = self.parse_text_to_nodes(REMARKS[name]) if name in REMARKS else []
                block = nodes.literal_block(text, text, language="text")
                made.append(section(label, nodes.title(label, label), block, *remark))
            return made

    class Statements(SphinxDirective):
        def run(self):
            made = []
            for kind, label in _KINDS.items():
                table = self.parse_text_to_nodes(statements(kind))
                made.append(section(f"statements {kind}", nodes.title(label, label), *table))
            return made

    def inline_formula(translator, node) -> None:
        translator.body.append(tex2mathml(node.astext()))
        raise nodes.SkipNode

    def block_formula(translator, node) -> None:
        translator.body.append(f"<div class='math'>{tex2mathml(node.astext(), as_block=True)}</div>")
        raise nodes.SkipNode

    app.add_directive("fald-study-keys", StudyKeys)
    app.add_directive("fald-commands", Commands)
    app.add_directive("fald-statements", Statements)
    app.connect("autodoc-process-docstring", show_equations, priority=400)  # before napoleon
    app.add_html_math_renderer("mathml", (inline_formula, None), (block_formula, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
