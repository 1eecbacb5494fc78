"""Run in place of Flower's ``flwr-clientapp``: the installed app, whatever app was submitted.

It is started by its path and imports ``fald`` only when Flower asks for the app. By then the process sends
signs of life; one without them is given up after a while, and loading JAX on a busy machine can take that
long.
"""

from __future__ import annotations

from typing import Any


def load_installed(*_: Any) -> Any:
    """The app that answers."""
    from fald.federation.engines.flower.app import client_app

    return client_app


def answer() -> None:
    """Do what ``flwr-clientapp`` does, without unpacking the submitted app."""
    from flwr.supernode.cli import flwr_clientapp
    from flwr.supernode.runtime import run_clientapp as runtime

    instead = {
        "install_from_fab": lambda *_, **__: None,
        "get_load_client_app_fn": lambda *_, **__: load_installed,
    }
    for name, function in instead.items():
        if not hasattr(runtime, name):  # better no answer than a stranger's code
            raise SystemExit(f"fald: this version of Flower loads apps in another way ({name} is gone)")
        setattr(runtime, name, function)
    flwr_clientapp()


if __name__ == "__main__":
    answer()
