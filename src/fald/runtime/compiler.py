"""How the compiler is asked to work."""

from __future__ import annotations

import functools
from typing import Any

import jax

# vectors as wide as the machine has them; without it half as wide where there are wider ones
_OPTIONS = {"xla_cpu_prefer_vector_width": 512}
_ONE_THREAD = {"xla_cpu_multi_thread_eigen": False, "xla_disable_hlo_passes": "cpu-parallel-task-assigner"}


def options(one_thread: bool = False) -> dict[str, Any] | None:
    """Options of ``jax.jit`` for clients' work; ``one_thread`` keeps all of it on the calling thread.

    They change the speed alone. An option that this version of the compiler does not know is left out.
    """
    if jax.default_backend() != "cpu":
        return None
    wanted = {**_OPTIONS, **(_ONE_THREAD if one_thread else {})}
    return {name: value for name, value in wanted.items() if _known(name, value)} or None


@functools.cache
def _known(name: str, value: Any) -> bool:
    try:
        jax.jit(lambda: 0, compiler_options={name: value}).lower().compile()
    except jax.errors.JaxRuntimeError as error:
        if "No such compile option" in str(error):
            return False
        raise
    return True
