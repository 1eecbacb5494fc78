"""A fresh environment with the example package of own models in it."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

import numpy as np

EXAMPLE = Path(__file__).parents[1] / "examples" / "own-models"


def environment(folder: Path, version: str = "1.0") -> Path:
    """Make an environment that sees what this one has, install the package, and return its Python."""
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    place = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    seen = [path for path in sys.path if path.endswith(("site-packages", "/src"))]
    (Path(place) / "seen.pth").write_text("\n".join(seen) + "\n")
    source = folder / "source"
    (source / "own_models").mkdir(parents=True)
    for path in [EXAMPLE / "pyproject.toml", *(EXAMPLE / "own_models").glob("*.py")]:
        text = path.read_text().replace('version = "1.0"', f'version = "{version}"')
        (source / path.relative_to(EXAMPLE)).write_text(text)
    command = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run([*command, source], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    for script in Path(sys.executable).parent.glob("fl*w*r*"):  # Flower starts its parts by name
        lines = script.read_text().splitlines()
        (folder / "bin" / script.name).write_text("\n".join([f"#!{python}", *lines[1:], ""]))
        (folder / "bin" / script.name).chmod(0o755)
    return python


def write_rows(folder: Path, sites: list[str]) -> None:
    """Doses and pressures as tables, and pictures of two kinds as archives, for each site."""
    rng = np.random.default_rng(0)
    folder.mkdir(exist_ok=True)
    for place, site in enumerate(sites):
        dose = rng.normal(size=40)
        pressure = 0.5 - 0.8 * dose + 0.6 * rng.normal(size=40)
        lines = [f"{a:.6f},{b:.6f}" for a, b in zip(dose, pressure)]
        (folder / f"{site}.csv").write_text("\n".join(["dose,pressure", *lines, ""]))
        label = rng.integers(0, 3, 60 + 10 * place).astype(np.uint8)
        noise = rng.integers(0, 120, (len(label), 4, 4))
        picture = (noise + 100 * (np.arange(16).reshape(4, 4) % 3 == label[:, None, None])).astype(np.uint8)
        np.savez(folder / f"{site}.npz", image=picture, label=label)


PRESSURE = """
[data]
target = "pressure"
features = ["dose"]

[model]
family = "own-models:pressure"

[federation]
timeout = 600
"""
IMAGES = """
[data]
target = "label"
features = ["image"]

[model]
family = "own-models:images"

[model.options]
pixels = 16
classes = 3
hidden = 4

[sampler]
num-rounds = {num_rounds}
num-warmup = 2
local-steps = 2
step-size = 2e-4
batch-size = 16
num-chains = 2
seed = 3

[federation]
timeout = 600
"""
POLICY = 'allowed-models = ["own-models:pressure", "own-models:images"]\nmax-seconds = 600\nunsummed = true\n'
