"""Run the quick tests on the newest other Python >= 3.11 that is present on this machine.

Most breaks between two versions come with the later one; `--all` runs those in between too. `--install` only
installs what the tests need, which can be done while this checkout is installed elsewhere.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

OLDEST = (3, 11)
# what depends on the interpreter: syntax, tables, files, signals, the command; not the mathematics
QUICK = ("cli/test_cli", "problem/test_data", "problem/test_models", "results/test_results", "core/test_keys")


def candidates():
    """Interpreters by name on the path, and those a version manager keeps beside it."""
    for minor in range(OLDEST[1], OLDEST[1] + 10):
        found = shutil.which(f"python3.{minor}")
        if found:
            yield found
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    yield from sorted(str(p) for p in root.glob("3.*/bin/python3"))


def main() -> int:
    """Test each distinct version once; return the first failing exit code."""
    found = {}
    for program in candidates():
        query = (
            "import sys, ensurepip, venv; "
            "print('%d.%d %d' % (*sys.version_info[:2], sys.prefix != sys.base_prefix))"
        )
        answer = subprocess.run([program, "-c", query], capture_output=True, text=True)
        match = re.fullmatch(r"(\d+)\.(\d+) 0\n", answer.stdout)
        if answer.returncode == 0 and match:
            version = tuple(int(part) for part in match.groups())
            if version >= OLDEST and version != sys.version_info[:2]:
                found.setdefault(version, program)
    if not found:
        print("no other Python >= 3.11 is present")
    chosen = sorted(found.items()) if "--all" in sys.argv[1:] else sorted(found.items())[-1:]
    for (major, minor), program in chosen:
        install = "--install" in sys.argv[1:]
        print(f"{'installing for' if install else 'testing on'} Python {major}.{minor}", flush=True)
        files = " ".join(f"tests/{name}.py" for name in QUICK)
        venv = f".venv-{major}.{minor}"
        target = f"{venv}/needs.stamp" if install else "test-quick"
        settings = [f"PYTHON={program}", f"VENV={venv}", f"PYTEST={files}"]
        # whatever make this runs under: its jobs are not ours to use
        free = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS")}
        code = subprocess.run(["make", target, *settings], env=free).returncode
        if code:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
