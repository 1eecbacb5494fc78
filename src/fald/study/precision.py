"""The floating type of a study's run."""

from __future__ import annotations

import jax

from fald.study.schema import Study


def set_precision(study: Study) -> None:
    """Choose float32 or float64 for the whole process, as the study says."""
    double = study.sampler is not None and study.sampler.precision == "float64"
    jax.config.update("jax_enable_x64", double)
