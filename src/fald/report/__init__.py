"""Reports: the answer, how far to trust it, the federation, the privacy, and how to do it again.

``write_report`` writes one HTML page that opens without a network, and the same as Markdown.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from fald.core.errors import StorageError
from fald.core.files import write_atomically
from fald.problem.data import FederatedData
from fald.problem.model import Model
from fald.report.content import report_document
from fald.report.page import html, markdown
from fald.results.examine import examine
from fald.study.folder import open_run
from fald.study.review import examine_run
from fald.study.run import Run

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["report_document", "report_finished", "report_run", "write_report"]


def write_report(
    tree: xr.DataTree,
    folder: str | Path,
    *,
    model: Model | None = None,
    data: FederatedData | None = None,
    level: float = 0.95,
    reference: xr.DataTree | None = None,
) -> Path:
    """Write ``report.html`` and ``report.md`` for a result.

    Parameters
    ----------
    tree
        A result of ``fald.fit`` or ``fald.sample``.
    folder
        Where to write; made if it does not exist.
    model, data
        What the result was made from. With them outcomes simulated from the posterior are compared with the
        rows; averages over fewer than ten rows are not shown.
    level
        Probability of the intervals.
    reference
        A result to compare with, such as one by NUTS on pooled rows.

    Returns
    -------
    pathlib.Path
        The page.

    Examples
    --------
    >>> import tempfile, numpy as np, fald
    >>> rng = np.random.default_rng(0)
    >>> clients = {name: (rng.normal(size=(50, 1)), rng.poisson(3.0, 50)) for name in "ab"}
    >>> data, model = fald.FederatedData.from_arrays(clients), fald.models.poisson_regression(["x"])
    >>> tree = fald.fit(0, model, data, progress=False)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     print(fald.write_report(tree, folder, model=model, data=data).name)
    report.html
    """
    other = None if reference is None else ("the reference", reference)
    found = examine(tree, model=model, data=data, level=level, reference=other)
    return _write(report_document(found), tree, Path(folder))


def report_run(folder: Path, out: Path | None = None, **how: Any) -> tuple[dict[str, Any], Path]:
    """Write the report of a run's folder, there or into ``out``; return its document and its page.

    ``how`` is passed on to ``fald.study.review.examine_run``.
    """
    study, tree = open_run(folder)
    document = report_document(examine_run(study, tree, **how)[0], study)
    return document, _write(document, tree, out or folder)


def report_finished(run: Run) -> Path:
    """Write the report of a run that has just been examined; return its page."""
    return _write(report_document(run.examined, run.study), run.tree, run.folder)


def _write(document: dict[str, Any], tree: xr.DataTree, folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"cannot make the folder {folder}: {error.strerror}") from error
    page = folder / "report.html"
    write_atomically(page, html(document, tree).encode("utf-8"))
    write_atomically(folder / "report.md", markdown(document).encode("utf-8"))
    return page
