"""The questions that tests in a browser ask: each must find what is wrong with a page that is wrong."""

import pytest
from harness import NARROW, low_contrast, nameless, overflows, tab_stops

pytestmark = pytest.mark.slow

GOOD = """<!doctype html><html lang="en"><head><title>Good</title><link rel="icon" href="data:,"></head>
<body><h1>Good</h1><p>Dark on white.</p><button>Press</button><label>Size <input></label>
<svg width="100" height="30"><text x="5" y="20" fill="#333333">seen</text></svg></body></html>"""


def page(tmp_path, content):
    path = tmp_path / "page.html"
    path.write_text(content, encoding="utf-8")
    return path


def everything(found):
    return [*found.complaints, *low_contrast(found), *overflows(found), *nameless(found)]


def test_a_good_page_passes(visit, tmp_path):
    found = visit(page(tmp_path, GOOD))
    assert everything(found) == []
    assert [(s["tag"], s["name"], s["shown"]) for s in tab_stops(found)] == [
        ("button", "Press", True),
        ("input", "Size", True),
    ]
    assert found.screenshot("harness").stat().st_size > 1000


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("Dark on white.", "<span style='color: #999'>Grey</span>", "Grey"),
        ("#333333", "#bbbbbb", "seen"),
        ("Dark on white.", "<div style='width: 600px'>Wide</div>", "600 of 390 px|608 of 390 px"),
        ("<button>Press</button>", "<button></button>", "<button>"),
        ("Dark on white.", "<img src='data:image/gif;base64,R0lGODlhAQABAAAAACwAAAAAAQABAAA='>", "<img"),
        ("<title>Good</title>", "", "no title"),
        ("Dark on white.", "<script>console.error('broken')</script>", "console error: broken"),
        ("Dark on white.", "<script>missing()</script>", "exception: missing"),
        ("Dark on white.", "<img alt='x' src='https://example.invalid/a.png'>", "request to elsewhere"),
        ("Dark on white.", "<script src='other.js'></script>", "request for another file"),
    ],
)
def test_a_wrong_page_is_found_out(visit, tmp_path, old, new, said):
    assert old in GOOD
    found = visit(page(tmp_path, GOOD.replace(old, new)), width=NARROW)
    assert any(part in line for line in everything(found) for part in said.split("|")), everything(found)


def test_a_stop_without_a_visible_focus_is_found_out(visit, tmp_path):
    found = visit(page(tmp_path, GOOD.replace("<button>", "<button style='outline: none'>")))
    assert [s["shown"] for s in tab_stops(found)] == [False, True]
