"""Reference text taken from the code while the pages are built, so that it cannot go stale.

``study_keys`` describes a section of the study file from its pydantic model, ``command_help`` captures the
help of a command. Types and defaults come from the code; only the meaning of a key is written here, and a
key without a meaning, or a meaning without a key, stops the build.
"""

from __future__ import annotations

from typing import Any

MEANINGS = {
    "": {
        "title": "Heads the printed result; kept in the attributes of the result.",
        "data": "Where the rows are; see below.",
        "model": "The regression; see below.",
        "sampler": "How to sample; see below.",
    },
    "data": {
        "file": "One CSV or Parquet table with the rows of all sites; needs `site`. Either this or `files`.",
        "site": "Column of `file` that names the site of each row.",
        "files": "One CSV or Parquet table per site: site name to path. All must have the columns named below.",
        "target": "Column with the outcome.",
        "features": "Columns to use as features, in this order.",
        "categories": "Column to its levels, two or more. A feature becomes one 0/1 column for each level after "
        "the first, called `column=level`; a target becomes the position of its level.",
        "scaling": "Column to `center` and `scale`: (x − center)/scale is used. Declared, not estimated from "
        "rows, because no one sees all rows. Effects are then per `scale` units.",
    },
    "data.scaling": {
        "center": "Subtracted from the column; moves only the intercept.",
        "scale": "The column is divided by it.",
    },
    "model": {
        "family": "Outcome: a number (`linear`), 0 or 1 (`logistic`), a count (`poisson`) or one of several "
        "classes (`softmax`).",
        "prior-scale": "Intercept and coefficients have independent normal priors with mean 0 and this standard "
        "deviation.",
        "noise-scale": "`linear` only: the residual standard deviation when it is known; left out, it is a "
        "parameter.",
        "noise-prior-scale": "`linear` with unknown residual standard deviation: scale of its half-normal prior.",
        "num-classes": "`softmax` only, and needed there: the number of classes.",
    },
    "sampler": {
        "num-rounds": "Communication rounds in all, warm-up included.",
        "local-steps": "K, steps each site takes between two rounds.",
        "step-size": "η, a constant, or a table with the two keys of the decaying step below.",
        "temperature": "τ; the chains sample the posterior to the power 1/τ. At 0 the method is FedAvg: a point "
        "estimate without intervals.",
        "correlation": "ρ, correlation of the injected noise between sites. 1 gives no privacy.",
        "participation": "Which sites take part in a round: all, or `num-participants` of them drawn with or "
        "without replacement.",
        "num-participants": "S, sites drawn per round; needed for, and only for, participation other than `full`.",
        "allow-unequal": "Permit `without-replacement` although the sites have different numbers of rows. The "
        "result is then another posterior.",
        "noise": "Scale of a site's own noise: by its weight in this round's average (`realised`) or by its "
        "share of the rows (`paper`).",
        "batch-size": "Rows per gradient, drawn afresh without replacement in every step; left out: all rows.",
        "num-chains": "Independent chains.",
        "num-warmup": "Rounds thrown away at the start.",
        "thinning": "Keep the draw of every so many rounds.",
        "seed": "The same seed gives the same draws.",
        "precision": "Floating type of the whole computation.",
    },
    "sampler.step-size": {
        "smoothness": "L in η_k = 1/(2L + m k/12): the largest curvature of any site's energy.",
        "strong-convexity": "m there: the smallest.",
    },
}

# Written into study.json by the program; not a key of the study file.
_INTERNAL = {"folder"}


def sections() -> dict[str, dict[str, Any]]:
    """Section of the study file -> JSON schema of its keys."""
    from fald.study import Study

    schema = Study.model_json_schema(by_alias=True)
    parts = schema["$defs"]
    found = {
        "": schema,
        "data": parts["DataSection"],
        "data.scaling": parts["Scale"],
        "model": parts["ModelSection"],
        "sampler": parts["SamplerSection"],
        "sampler.step-size": parts["Decay"],
    }
    missing = sorted(set(parts) - {part["title"] for part in found.values()})
    if missing:
        raise ValueError(f"sections of the study file without documentation: {missing}")
    return found


def study_keys(section: str) -> str:
    """A Markdown table of the keys of one section; ``""`` is the top level."""
    schema, meanings = sections()[section], MEANINGS[section]
    keys = {k: v for k, v in schema["properties"].items() if section or k not in _INTERNAL}
    if set(keys) != set(meanings):
        raise ValueError(f"section {section!r}: documented are {sorted(meanings)}, keys are {sorted(keys)}")
    lines = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for key, rule in keys.items():
        default = "*needed*" if key in schema.get("required", ()) else _default(rule)
        lines.append(f"| `{key}` | {_type(rule)} | {default} | {meanings[key]} |")
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
    if kind == "array":
        return f"list of ({_type(rule['items'])})" if "anyOf" in rule["items"] else f"list of {_type(rule['items'])}"
    if kind == "object":
        inner = _type(rule["additionalProperties"])
        return "table of tables" if inner == "table" else f"table of {inner}"
    words = {"string": "text", "number": "number", "integer": "whole number", "boolean": "true or false", "null": ""}
    limits = {"exclusiveMinimum": ">", "minimum": "≥", "exclusiveMaximum": "<", "maximum": "≤"}
    bounds = [f"{sign} {_bound(rule[name])}" for name, sign in limits.items() if name in rule]
    return " ".join([words[kind or "object"], ", ".join(bounds)]).strip()


def _bound(value: float) -> str:
    return "2⁶³" if value == 2**63 else f"{value:g}"


def command_names() -> list[str]:
    """The commands of ``fald``, in the order its help lists them."""
    from fald.cli import app

    return [info.name or info.callback.__name__ for info in app.registered_commands]


def command_help(name: str) -> str:
    """The help text of ``fald NAME``, or of ``fald`` itself for ``""``."""
    from typer.testing import CliRunner

    from fald.cli import app

    arguments = [*([name] if name else []), "--help"]
    result = CliRunner().invoke(app, arguments, prog_name="fald", terminal_width=88)
    if result.exit_code != 0:
        raise ValueError(f"fald {name} --help ended with {result.exit_code}: {result.output}")
    return result.output.rstrip()


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
    """Register the directives ``fald-study-keys`` and ``fald-help``, and how docstrings are shown."""
    from docutils import nodes
    from sphinx.util.docutils import SphinxDirective

    class StudyKeys(SphinxDirective):
        optional_arguments = 1

        def run(self):
            return self.parse_text_to_nodes(study_keys(self.arguments[0] if self.arguments else ""))

    class Help(SphinxDirective):
        optional_arguments = 1

        def run(self):
            name = self.arguments[0] if self.arguments else ""
            text = f"$ fald {name} --help".replace("  ", " ") + "\n" + command_help(name)
            return [nodes.literal_block(text, text, language="text")]

    app.add_directive("fald-study-keys", StudyKeys)
    app.add_directive("fald-help", Help)
    app.connect("autodoc-process-docstring", show_equations, priority=400)  # before napoleon
    return {"parallel_read_safe": True, "parallel_write_safe": True}
