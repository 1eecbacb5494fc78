"""A report's document as one HTML page and as Markdown.

Every number in a table is looked up in the document by its JSON pointer and carries both, so that nothing on
the page can differ from the files: ``<data value="0.4539…" data-key="/run/summary/0/mean">0.454</data>``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import partial
from html import escape as plain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fald.langevin.registry import with_law
from fald.privacy.statements import rounded_up
from fald.report.figures import MOST_ROWS, figures
from fald.report.svg import Plot
from fald.results.judgement import WORDS
from fald.results.kinds import KINDS
from fald.results.text import labelled, number, percent

if TYPE_CHECKING:
    import xarray as xr

TEMPLATES = Path(__file__).parent / "templates"
MOST_TABLE_ROWS = 200


def _probability(value: float) -> str:
    """A probability in per cent, without claiming certainty.

    Examples
    --------
    >>> _probability(0.42), _probability(1.0), _probability(0.0001)
    ('42.0%', '> 99.9%', '< 0.1%')
    """
    if value > 0.999:
        return "> 99.9%"
    return "< 0.1%" if value < 0.001 else f"{100 * value:.1f}%"


FORMATS: dict[str, Callable[[Any], str]] = {
    "number": number,
    "count": lambda value: f"{value:,.0f}",
    "percent": percent,
    "probability": _probability,
    "rhat": lambda value: f"{value:.3f}",
    "p": lambda value: f"{value:.2g}",
    "bound": rounded_up,
}


def look_up(document: Any, pointer: str) -> Any:
    """The value at a JSON pointer (RFC 6901).

    Examples
    --------
    >>> look_up({"a": [{"b/c": 1.5}]}, "/a/0/b~1c")
    1.5
    """
    for part in pointer.split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        document = document[int(key)] if isinstance(document, (list, tuple)) else document[key]
    return document


def pointer(*parts: Any) -> str:
    """The JSON pointer of some keys."""
    return "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in parts)


def _shown(document: Mapping[str, Any], how: str, *parts: Any) -> str:
    """The text of a value; a dash where there is none, words as they are."""
    value = look_up(document, pointer(*parts))
    if value is None:
        return "–"
    return value if isinstance(value, str) else FORMATS[how](value)


def _marked(document: Mapping[str, Any], how: str, *parts: Any) -> Any:
    """The same for the page, with the exact value and where it stands in the document."""
    from markupsafe import Markup

    where = pointer(*parts)
    value = look_up(document, where)
    text = _shown(document, how, *parts)
    if value is None or isinstance(value, str):
        return Markup("{}").format(text)
    return Markup('<data value="{}" data-key="{}" data-how="{}">{}</data>').format(
        repr(value), where, how, text
    )


def _context(document: Mapping[str, Any]) -> dict[str, Any]:
    run = document["run"]
    level = run.get("level", 0.95)
    tail = 100 * (1 - level) / 2
    return {
        "d": document,
        "run": run,
        "title": run["title"] or f"{run['model']} model",
        "answer": answer(document),
        "question": question(document),
        "low": f"{tail:g}%",
        "high": f"{100 - tail:g}%",
        "interval": f"{100 * level:g}% interval",
        "kind": KINDS[run["kind"]],
        "judged": run["judgement"],
        "words": WORDS,
        "method": run["method"].upper() if run["method"] in with_law() else run["method"],
        "labelled": partial(labelled, units=run["units"]),
        "most_rows": MOST_TABLE_ROWS,
        "most_drawn": MOST_ROWS,
        "study_toml": study_toml(document["study"]),
        "statement": document["privacy_statement"].splitlines(),
    }


def question(document: Mapping[str, Any]) -> str:
    """What was asked, in a sentence."""
    sites = document["sites"]
    where = f"{sum(s['rows'] for s in sites):,} rows at {len(sites)} site{'s' if len(sites) > 1 else ''}"
    if not document["target"]:
        return f"The posterior of the {document['run']['model']} model over {where}."
    names = document["features"]
    listed = ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")
    if document["origin"]:
        model = f"The model {document['family']} of {document['origin']}, no part of fald, over {where}."
    else:
        has_coefficients = any(e["neutral"] is not None for e in document["effects"])
        model = f"A {document['family']} {'regression' if has_coefficients else 'model'} over {where}."
    asked = f"How does {document['target']} depend on {listed}? {model}"
    asked = f"{asked} Priors: {document['prior']}." if document["prior"] else asked
    left = "; ".join(document["undeclared"])
    return f"{asked} The model does not declare {left}." if left else asked


def answer(document: Mapping[str, Any]) -> list[str]:
    """What was found, in sentences: the first effect, then those that are clearly there."""
    effects, run = document["effects"], document["run"]
    if not effects or effects[0]["neutral"] is None:
        return []
    first, level = effects[0], f"{100 * run['level']:g}% credible interval"
    numbers = f"{number(first['estimate'])} ({level} {number(first['low'])} to {number(first['high'])})"
    target = document["target"] or "the outcome"
    up = first["above"] >= 0.5
    sure = _probability(first["above"] if up else 1 - first["above"])
    if first["scale"]:
        noun = first["scale"].removesuffix(" ratio")
        said = f"{first['label']} multiplies the {noun} of {target} by {numbers}"
        side = f"it {'raises' if up else 'lowers'} the {noun}"
    else:
        said = f"One unit more of {first['label']} changes {target} by {numbers}"
        side = f"this change is {'positive' if up else 'negative'}"
    sentences = [f"{said}. The posterior probability that {side} is {sure}."]
    clear = [e for e in effects if e["excluded"]]
    named = ", ".join(f"{e['label']} ({'up' if e['above'] > 0.5 else 'down'})" for e in clear[:8])
    more = f" and {len(clear) - 8} more" if len(clear) > 8 else ""
    neutral = f"{first['neutral']:g}"
    sentences.append(
        f"{len(clear)} of {len(effects)} intervals exclude {neutral}: {named}{more}."
        if clear
        else f"All {len(effects)} intervals contain {neutral}: no effect is clearly there."
    )
    return sentences


def study_toml(study: Mapping[str, Any] | None) -> str:
    """The study as a file that ``fald run`` takes."""
    if study is None:
        return ""
    import tomli_w

    return tomli_w.dumps({key: _filled(value) for key, value in study.items() if key != "folder"})


def _filled(value: Any) -> Any:
    """Settings without empty tables."""
    return {k: _filled(v) for k, v in value.items() if v != {}} if isinstance(value, Mapping) else value


def environment(*, html: bool) -> Any:
    """Where the templates are, and how they are filled."""
    import jinja2

    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=html,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def html(document: Mapping[str, Any], tree: xr.DataTree) -> str:
    """The page: one file that needs nothing else."""
    from markupsafe import Markup

    drawn = figures(document, tree)
    template = environment(html=True).get_template("report.html")
    return template.render(
        **_context(document),
        show=partial(_marked, document),
        plots=drawn,
        drawn=lambda name, words: Markup(_drawn(drawn, name, words)),
        document=Markup(_inline(document)),
        breakable=_breakable,
        style=Markup((TEMPLATES / "report.css").read_text(encoding="utf-8")),
        script=Markup((TEMPLATES / "report.js").read_text(encoding="utf-8")),
    )


def _drawn(plots: Mapping[str, Plot], name: str, words: str) -> str:
    """A figure with its words, and hidden beside it the same on another scale, where there is one."""
    if name not in plots:
        return ""
    other = f"{name}-log"
    more = plots[other].svg(other, f"{words} Logarithms.", hidden=True) if other in plots else ""
    caption = f"<figcaption>{plain(words)}</figcaption>"
    return f"<figure>{plots[name].svg(name, words)}{more}{caption}</figure>"


def markdown(document: Mapping[str, Any]) -> str:
    """The same words and numbers as Markdown, without figures."""
    text = (
        environment(html=False)
        .get_template("report.md")
        .render(**_context(document), show=partial(_shown, document), cell=_cell)
    )
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def _breakable(name: str) -> Any:
    """A name that may go on in the next line after an underscore."""
    from markupsafe import Markup, escape

    return Markup("_<wbr>").join(escape(part) for part in name.split("_"))


def _cell(text: Any) -> str:
    """A name in a Markdown table or sentence."""
    return re.sub(r"([\\`*_\[\]<>|#])", r"\\\1", str(text)).replace("\n", " ")


def _inline(value: Any) -> str:
    """JSON that cannot end the script element it stands in."""
    text = json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
