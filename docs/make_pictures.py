"""Pictures of the demo, from the files of a demo run: its forest plot as SVG, and the top of its report.

fald demo
python docs/make_pictures.py fald-demo
"""

import json
import math
import sys
from html import escape
from pathlib import Path

IMAGES = Path(__file__).parent / "images"

# Blue and dark grey of equal weight on white: apart for every kind of colour vision, and by shape too.
EFFECT, OTHER, FAINT, INK = "#0072b2", "#5a5a5a", "#d5d5d5", "#1a1a1a"
FONT = "font-family='Helvetica, Arial, sans-serif'"

WIDTH, LEFT, RIGHT, TOP, STEP = 820, 250, 610, 84, 30
TICKS = (0.25, 0.5, 1, 2, 4)


def place(ratio: float) -> float:
    """Horizontal position of a ratio; equal factors are equal distances."""
    low, high = math.log(TICKS[0]), math.log(TICKS[-1])
    return LEFT + (RIGHT - LEFT) * (math.log(ratio) - low) / (high - low)


def text(x: float, y: float, content: str, *, size=14, fill=INK, anchor="start", bold=False) -> str:
    """One line of text."""
    weight = " font-weight='bold'" if bold else ""
    return (
        f"<text x='{x:.1f}' y='{y:.1f}' font-size='{size}' fill='{fill}' "
        f"text-anchor='{anchor}'{weight}>{escape(content)}</text>"
    )


def line(x1: float, y1: float, x2: float, y2: float, stroke: str, width=1.0, dash="") -> str:
    """One straight line."""
    dashed = f" stroke-dasharray='{dash}'" if dash else ""
    return (
        f"<line x1='{x1:.1f}' y1='{y1:.1f}' x2='{x2:.1f}' y2='{y2:.1f}' "
        f"stroke='{stroke}' stroke-width='{width}'{dashed}/>"
    )


def label(parameter: str, scaling: dict) -> str:
    """A parameter's name in words, with the unit its ratio is for."""
    scale = scaling.get(parameter, {}).get("scale", 1)
    return parameter.replace("_", " ") + ("" if scale == 1 else f", per {scale:g} years")


def row(y: float, record: dict, name: str, effect: bool) -> list[str]:
    """Name, interval, point and numbers of one parameter."""
    ratio, low, high = (record[k] for k in ("odds ratio", "odds ratio 2.5%", "odds ratio 97.5%"))
    colour, x = EFFECT if effect else OTHER, place(ratio)
    points = f"{x - 6:.1f},{y} {x:.1f},{y - 6} {x + 6:.1f},{y} {x:.1f},{y + 6}"
    mark = (
        f"<polygon points='{points}' fill='{colour}'/>"
        if effect
        else f"<circle cx='{x:.1f}' cy='{y}' r='4.5' fill='{colour}'/>"
    )
    return [
        text(24, y + 5, name, fill=colour if effect else INK, bold=effect),
        line(place(low), y, place(high), y, colour, 3 if effect else 2),
        mark,
        text(
            WIDTH - 24, y + 5, f"{ratio:.2f} ({low:.2f} to {high:.2f})",
            anchor="end", fill=colour if effect else INK, bold=effect,
        ),
    ]  # fmt: skip


def forest(summary: dict, study: dict) -> str:
    """The whole picture."""
    records = [r for r in summary["summary"] if r["odds ratio"] is not None]
    scaling = study["data"]["scaling"]
    rows = sum(int(s["rows"]) for s in summary["sites"])
    bottom = TOP + STEP * len(records)
    height = bottom + 62
    level = f"{100 * summary['level']:g}%"
    sites = f"{rows} patients at {len(summary['sites'])} hospitals"
    body = [
        text(24, 32, f"Pancreatitis after ERCP: odds ratios, {level} credible intervals", size=17, bold=True),
        text(24, 54, f"{sites}; indomethacin was randomised, the other rows are covariates", fill=OTHER),
    ]
    for tick in TICKS:
        x, neutral = place(tick), tick == 1
        body.append(line(x, TOP - 16, x, bottom, OTHER if neutral else FAINT, 1, "4 3" * neutral))
        body.append(text(x, bottom + 18, f"{tick:g}", size=13, fill=OTHER, anchor="middle"))
    for i, record in enumerate(records):
        body += row(TOP + STEP * i, record, label(record["parameter"], scaling), i == 0)
    body.append(text(place(0.5), bottom + 42, "← lower odds", size=13, fill=OTHER, anchor="middle"))
    body.append(text(place(2), bottom + 42, "higher odds →", size=13, fill=OTHER, anchor="middle"))
    first = records[0]
    told = (
        f"{first['parameter']}: odds ratio {first['odds ratio']:.2f}, interval "
        f"{first['odds ratio 2.5%']:.2f} to {first['odds ratio 97.5%']:.2f}"
    )
    return "\n".join(
        [
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {height}' "
            f"width='{WIDTH}' height='{height}' role='img' {FONT}>",
            "<title>Odds ratios of the demo with credible intervals</title>",
            f"<desc>{escape(told)}</desc>",
            f"<rect width='{WIDTH}' height='{height}' rx='6' fill='#ffffff'/>",
            *body,
            "</svg>",
            "",
        ]
    )


def screenshot(page: Path, target: Path, height: int = 1010) -> None:
    """The top of a page as a small PNG; needs Chromium, as the tests of pages do."""
    from PIL import Image
    from playwright.sync_api import sync_playwright

    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "browser"))
    from harness import FLAGS, NO_BROWSER, find_chromium

    program = find_chromium()
    if program is None:
        sys.exit(NO_BROWSER)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=list(FLAGS))
        view = browser.new_page(viewport={"width": 760, "height": height})
        view.goto(page.resolve().as_uri())
        view.screenshot(path=target, animations="disabled")
        browser.close()
    Image.open(target).quantize(64).save(target, optimize=True)  # a third of the size, and looks the same


def main() -> None:
    """Read the files of a run and write the pictures."""
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    folder = Path(sys.argv[1])
    summary, study = (json.loads((folder / f"{name}.json").read_text()) for name in ("summary", "study"))
    IMAGES.mkdir(exist_ok=True)
    target = IMAGES / "demo.svg"
    target.write_text(forest(summary, study), encoding="utf-8")
    screenshot(folder / "report.html", IMAGES / "report.png")
    print(f"wrote {target} and {IMAGES / 'report.png'}")


if __name__ == "__main__":
    main()
