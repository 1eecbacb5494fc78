"""The command, which waits at a declared place to be stopped there: ``stopping.py FILE run study.toml …``.

It saves after every chunk of rounds, says ``waiting`` when it has first written the file of that name, and
goes no further. So a run is stopped in its middle however fast or slow the machine is.
"""

import subprocess
import sys
import time
from pathlib import Path


def start(place, *arguments, cwd):
    """Start the command in a process of its own; return the process once it waits at ``place``."""
    command = [sys.executable, __file__, place, *map(str, arguments)]
    process = subprocess.Popen(command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    if process.stdout.readline() != "waiting\n":
        raise AssertionError(f"it ended before {place} was written: {process.communicate()}")
    return process


def main():
    from fald.cli.main import main
    from fald.runtime import checkpoint, loop

    places = {sys.argv.pop(1)}
    write = checkpoint.write_atomically

    def write_and_wait(path, content):
        write(path, content)
        if Path(path).name in places:
            places.clear()  # who stops it may have it write this file again
            print("waiting", flush=True)
            time.sleep(3600)

    checkpoint.write_atomically = write_and_wait
    loop._Keeper.save_if_due = loop._Keeper.save
    main()


if __name__ == "__main__":
    main()
