"""Sphinx settings: pages are MyST Markdown, code cells are run, warnings are errors (make docs)."""

import os
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "_ext"))

from fald.core.version import __version__  # noqa: E402

# The kernels that run the pages inherit this: the `fald` beside this Python, on the CPU, plain text.
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["NO_COLOR"] = "1"
os.environ["PYTHONPATH"] = str(HERE.parent / "examples" / "own-models")  # as if the package were installed
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(HERE / "_build" / "compiled"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")

project = "fald"
author = "The fald developers"
copyright = author
release = version = __version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "generated_reference"]
exclude_patterns = ["_build", "_ext", "**/.ipynb_checkpoints"]

myst_enable_extensions = ["deflist", "dollarmath"]
myst_heading_anchors = 3
nb_execution_mode = "force"
nb_execution_in_temp = True
nb_execution_raise_on_error = True
nb_execution_timeout = 180
nb_merge_streams = True

autodoc_member_order = "bysource"
autodoc_typehints = "none"
napoleon_google_docstring = False
napoleon_use_rtype = False
napoleon_use_param = False
napoleon_preprocess_types = False
maximum_signature_line_length = 90
python_display_short_literal_types = True

html_theme = "furo"
html_math_renderer = "mathml"
html_title = f"fald {__version__}"
html_static_path = ["_static"]
html_css_files = ["fald.css"]
html_show_sphinx = False
