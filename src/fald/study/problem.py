"""What a study asks of which rows: its sections ``[data]`` and ``[model]``, and how its files are read."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from fald.core.errors import ConfigError
from fald.core.types import float_dtype
from fald.problem.data import FederatedData, encode_features, read_table
from fald.problem.encoding import encoded_names
from fald.problem.families import FAMILIES, check_options, options_of
from fald.problem.model import Model

if TYPE_CHECKING:
    import pandas as pd


def kebab(name: str) -> str:
    """A setting as it is called in files and on the command line."""
    return name.replace("_", "-")


class Section(BaseModel):
    """A table of a study file."""

    model_config = ConfigDict(alias_generator=kebab, populate_by_name=False, extra="forbid", frozen=True)


class Scale(Section):
    """Declared centering and scaling of a column: (x − center)/scale is used."""

    center: float = 0.0
    scale: Annotated[float, Field(gt=0)] = 1.0


class DataSection(Section):
    """Where the rows are, and which columns matter."""

    file: str | None = None
    site: str | None = None
    files: dict[str, str] = Field(default_factory=dict)
    target: str
    features: list[str]
    categories: dict[str, list[str | int]] = Field(default_factory=dict)
    scaling: dict[str, Scale] = Field(default_factory=dict)
    bounds: tuple[float, float] | None = None

    @model_validator(mode="after")
    def _one_source(self):
        if self.files and self.file:
            raise ValueError("give either 'files' (one per site) or 'file' with 'site'")
        if self.file and not self.site:
            raise ValueError("'file' needs 'site', the column that names the site of each row")
        if self.files and self.site:
            raise ValueError("'site' goes with 'file'; with 'files' the site is the name of the file")
        return self


_MeanAndSd = tuple[float, Annotated[float, Field(gt=0)]]


class Scales(Section):
    """What priors are relative to: mean and sd of the outcome, and of every encoded feature by name."""

    outcome: _MeanAndSd
    features: dict[str, _MeanAndSd]


class ModelSection(Section):
    """The regression: outcome family and priors; ``options`` has those that only some families take."""

    family: str
    prior_scale: Annotated[float, Field(gt=0)] | None = None
    scales: Scales | None = None
    noise_scale: Annotated[float, Field(gt=0)] | None = None
    noise_prior_scale: Annotated[float, Field(gt=0)] | None = None
    num_classes: Annotated[int, Field(ge=2, le=10_000)] | None = None
    options: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _only_what_fits(self):
        try:
            check_options(self.family, self.arguments())
        except ConfigError as error:
            raise ValueError(f"{error.message}; {error.hint}") from None
        return self

    def arguments(self) -> dict[str, Any]:
        """Options for the family."""
        fields, known = ModelSection.model_fields, options_of(self.family)
        values = {name: getattr(self, name) for name in fields if name not in ("family", "options")}
        # written out studies have every key; a default says nothing that a family without it could mind
        said = {n: v for n, v in values.items() if v is not None and (n in known or v != fields[n].default)}
        if self.scales is not None:
            said["scales"] = self.scales.model_dump()
        return said | {name.replace("-", "_"): value for name, value in self.options.items()}


class Question(Section):
    """The part of a study that says what is asked of which rows."""

    title: str = ""
    data: DataSection
    model: ModelSection

    def read_files(self, files: Mapping[str, Path]) -> FederatedData:
        """Read and check given files, one per site, as the study's own."""
        d, read = self.data, self.reader()
        if read is None:
            data = FederatedData.from_files(files, **self.encoding())
        else:
            data = FederatedData.from_reader(files, read, target=d.target, features=d.features)
        return data if d.bounds is None else data.bounded(*d.bounds)

    def read_frame(self, frame: pd.DataFrame, name: str) -> FederatedData:
        """Encode and check one site's table, as ``read_files`` does with the table of a file."""
        site = "_".join(["site", *map(str, frame.columns)])  # no column has this name
        data = FederatedData.from_frame(frame.assign(**{site: name}), site=site, **self.encoding())
        return data if self.data.bounds is None else data.bounded(*self.data.bounds)

    def reader(self) -> Callable[[Path, list[str], str | None], Any] | None:
        """The function by which the model reads files; None: fald encodes the columns of tables."""
        read = getattr(FAMILIES[self.model.family], "read", None)
        if read is not None and (self.data.categories or self.data.scaling):
            raise ConfigError(
                f"the model {self.model.family!r} reads files by itself, without categories and scaling",
                hint="leave them out, and give the model options of its own",
            )
        return read

    @property
    def encodes(self) -> bool:
        """Whether fald encodes the columns of tables for the model."""
        return self.reader() is None

    @property
    def encoded_features(self) -> tuple[str, ...]:
        """Names of the features that the model is made with."""
        return encoded_names(self.data.features, self.data.categories)

    def encoding(self) -> dict[str, Any]:
        """Arguments by which tables are encoded."""
        d, own = self.data, self._outcome_scaling
        return {
            "target": d.target,
            "features": d.features,
            "categories": d.categories,
            "scaling": {c: (s.center, s.scale) for c, s in d.scaling.items() if not (own and c == d.target)},
        }

    @property
    def _outcome_scaling(self) -> tuple[float, float] | None:
        """Declared scaling of the outcome, where the family takes it and answers in the outcome's units."""
        scale = self.data.scaling.get(self.data.target)
        takes_it = "outcome_scaling" in options_of(self.model.family)
        return (scale.center, scale.scale) if scale is not None and takes_it else None

    def read_features(self, path: str | Path) -> np.ndarray:
        """Read new rows and encode their features as the study's own."""
        d, read = self.data, self.reader()
        if read is not None:
            return np.asarray(read(Path(path), list(d.features), None))
        scaling = {c: (s.center, s.scale) for c, s in d.scaling.items() if c != d.target}
        categories = {c: levels for c, levels in d.categories.items() if c != d.target}
        features = encode_features(
            read_table(path), str(path), d.features, categories=categories, scaling=scaling
        )
        return features if d.bounds is None else np.clip(features, *d.bounds)

    def build_model(self, features: Iterable[str]) -> Model:
        """The model over the encoded feature columns."""
        scaling = json.dumps(self._outcome_scaling)
        return _built(json.dumps(self.model.model_dump()), scaling, tuple(features), str(float_dtype()))


@functools.lru_cache(maxsize=64)
def _built(section: str, scaling: str, names: tuple[str, ...], dtype: str) -> Model:
    """One model for one description and precision, so that what was compiled for it is found again."""
    m, own = ModelSection.model_validate(json.loads(section), by_name=True), json.loads(scaling)
    model = FAMILIES[m.family](names, **m.arguments(), **({"outcome_scaling": own} if own else {}))
    if not isinstance(model, Model):
        raise ConfigError(f"{m.family!r} makes no fald.Model but {type(model).__name__}")
    return replace(model, origin=" ".join(FAMILIES.origin(m.family) or ()))
