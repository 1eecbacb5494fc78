"""Reference text taken from the code while the pages are built, so that it cannot go stale.

The study keys come from the pydantic models, the help from the commands. Types and defaults are the code's;
only the meaning of a key is written here, and a key without a meaning, or a meaning without a key, stops the
build. Formulas become MathML, so that the pages need no network.
"""

from __future__ import annotations

from typing import Any

MEANINGS = {
    "": {
        "title": "Heads the printed result; kept in the attributes of the result.",
        "data": "Where the rows are; see below.",
        "model": "The regression; see below.",
        "sampler": "How to sample; see below.",
        "privacy": "What a private run may spend; see below. Left out, the run is a simulation without any "
        "privacy guarantee.",
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
        "bounds": "Lower and upper bound into which every encoded feature is clipped. Declared, not read off the "
        "rows; gives some models the bounded gradients that privacy accounting needs.",
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
        "clip-norm": "Norm to which the gradient of each row is cut, as privacy accounting needs it. The result "
        "is then a pseudo-posterior, not that of the model as written.",
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
    "privacy": {
        "delta": "δ of the guarantee; choose it well below one over the rows of a site.",
        "max-epsilon": "Budget: the run stops, with exit code 6, before the round that would exceed it. Left out, ε "
        "is only recorded.",
        "client-noise": "`entropy`: sites draw noise and batches from the operating system and keep them nowhere, so "
        "the run cannot be repeated. `seeded`: a simulation, which protects nobody and says so.",
        "method": "Accountant: privacy loss distributions (`pld`, tighter) or Rényi divergences (`rdp`).",
    },
}

# Said before the table of a section.
INTRODUCTIONS = {
    "data.scaling": "For each column a table, such as `age = { center = 60, scale = 10 }`.",
    "sampler.step-size": "The decaying step of the paper, `step-size = { smoothness = 240, strong-convexity = 5 }`.",
}

# Said after the help of a command.
REMARKS = {
    "run": "`--set` takes any [study key](study-keys.md), with its section (`sampler.step-size=1e-4`) or without "
    "where the key alone is clear (`step-size=1e-4`). Values are written as in TOML; text needs no quotes.",
    "diagnose": "Besides the summary it prints, for each site, its rows and share, the number of kept draws it took "
    "part in (all chains), and the mean and largest distance between where the site ended a round and the new average.",
    "predict": "Rows are numbered from 0 in the order of the file. The columns `mean`, `2.5%` and `97.5%` are the "
    "posterior mean and credible interval of the expected outcome (a probability for `logistic`); for `linear` and "
    "`poisson`, `outcome 2.5%` and `outcome 97.5%` hold a new observation.",
}

# Written into study.json by the program; not a key of the study file.
_INTERNAL = {"folder"}


# Tables inside a section, by the name of their pydantic model.
_INNER = {"Scale": "data.scaling", "Decay": "sampler.step-size"}


def sections() -> dict[str, dict[str, Any]]:
    """Section of the study file -> JSON schema of its keys; ``""`` is the top level."""
    from fald.study import Study

    schema = Study.model_json_schema(by_alias=True)
    parts = schema["$defs"]
    found = {"": schema}
    for key, rule in schema["properties"].items():
        name = next((str(r["$ref"]).rsplit("/", 1)[-1] for r in [rule, *rule.get("anyOf", ())] if "$ref" in r), None)
        if name is not None:
            found[key] = parts[name]
            inner = {_INNER[n]: parts[n] for n in parts if _INNER.get(n, "").startswith(f"{key}.")}
            found |= dict(sorted(inner.items()))
    missing = sorted(set(parts) - {part["title"] for part in found.values()})
    if missing:
        raise ValueError(f"docs/_ext/generated_reference.py does not know these tables of the study file: {missing}")
    return found


def study_keys(section: str) -> str:
    """A Markdown table of the keys of one section; ``""`` is the top level."""
    schema, meanings = sections()[section], MEANINGS.get(section, {})
    keys = {k: v for k, v in schema["properties"].items() if section or k not in _INTERNAL}
    if set(keys) != set(meanings):
        without, unused = sorted(set(keys) - set(meanings)), sorted(set(meanings) - set(keys))
        raise ValueError(
            f"MEANINGS in docs/_ext/generated_reference.py, section {section!r}: no meaning for {without}, "
            f"no key for {unused}"
        )
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
    if "prefixItems" in rule:
        return f"list of {len(rule['prefixItems'])} numbers"
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
                label = "step-size as a table" if name == "sampler.step-size" else f"[{name}]" if name else "Top level"
                text = "\n\n".join(t for t in (INTRODUCTIONS.get(name), study_keys(name)) if t)
                made.append(section(f"keys {name}", nodes.title(label, label), *self.parse_text_to_nodes(text)))
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

    def inline_formula(translator, node) -> None:
        translator.body.append(tex2mathml(node.astext()))
        raise nodes.SkipNode

    def block_formula(translator, node) -> None:
        translator.body.append(f"<div class='math'>{tex2mathml(node.astext(), as_block=True)}</div>")
        raise nodes.SkipNode

    app.add_directive("fald-study-keys", StudyKeys)
    app.add_directive("fald-commands", Commands)
    app.connect("autodoc-process-docstring", show_equations, priority=400)  # before napoleon
    app.add_html_math_renderer("mathml", (inline_formula, None), (block_formula, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
