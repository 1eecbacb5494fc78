"""A site's worker loads what it takes to answer, and nothing that plans, judges, reports or prints."""

import subprocess
import sys

FORBIDDEN = (
    "fald.planner", "fald.report", "fald.pages", "fald.cli", "fald.results.text", "fald.results.terminal",
    "fald.results.document", "fald.results.examine", "plotly", "matplotlib", "typer", "rich", "jinja2",
)  # fmt: skip


def loaded(module):
    """Which of the forbidden modules a fresh process has after importing one."""
    code = f"import sys, {module}; print(*[m for m in {FORBIDDEN} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=True
    )
    return done.stdout.split()


def test_a_site_loads_no_planner_report_plotting_or_text():
    assert loaded("fald.federation.site.worker") == []
    # the twin: the page of a report has what a site has not
    assert {"fald.planner", "fald.report", "fald.results.text"} <= set(loaded("fald.report.page"))
