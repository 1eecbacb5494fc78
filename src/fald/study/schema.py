"""The study file: one configuration model, the same kebab-case keys in TOML and on the command line."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from fald.core.errors import ConfigError, printable
from fald.fewround.methods import FitMethod
from fald.langevin.method import Method
from fald.langevin.registry import METHODS, by_name, takes
from fald.privacy.accountants import ACCOUNTANTS
from fald.privacy.protection import Protection
from fald.problem.data import FederatedData, read_table
from fald.settings.fald import RULES, NoiseScale, Preconditioner, checked, method_settings
from fald.settings.participation import Participation
from fald.settings.schedules import paper_decay
from fald.study.problem import DataSection, ModelSection, Question, Scales, Section, kebab


class Decay(Section):
    """The paper's decaying step 1/(2·smoothness + strong-convexity·k/12)."""

    smoothness: Annotated[float, Field(gt=0)]
    strong_convexity: Annotated[float, Field(gt=0)]


class SamplerSection(Section):
    """Settings of FA-LD, named as in ``fald.sample`` and checked by the same rules."""

    method: str = "fa-ld"
    num_rounds: Annotated[int, Field(lt=2**31)]
    local_steps: Annotated[int, Field(lt=2**31)] = 1
    step_size: float | Decay | None = None
    temperature: float = 1.0
    correlation: float = 0.0
    participation: Literal["full", "with-replacement", "without-replacement"] = "full"
    num_participants: Annotated[int, Field(ge=1)] | None = None
    allow_unequal: bool = False
    noise: NoiseScale = "realised"
    batch_size: int | None = None
    clip_norm: float | None = None
    momentum: float = 0.0
    preconditioner: Preconditioner | None = None
    num_chains: int = 4
    num_warmup: int = 0
    thinning: int = 1
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    precision: Literal["float32", "float64"] = "float32"
    options: dict[str, Any] = Field(default_factory=dict)

    @field_validator(*sorted(set(RULES) - {"sensitivity"}))
    @classmethod
    def _rule(cls, value: Any, info: ValidationInfo) -> Any:
        name = str(info.field_name)
        if isinstance(value, Decay) or (value is None and name == "step_size"):
            return value
        try:
            return checked(name, value)
        except ConfigError as error:
            rule = error.message.removeprefix(f"{kebab(name)} ").partition("; got")[0]
            raise PydanticCustomError("rule", "{rule}", {"rule": rule}) from None

    @model_validator(mode="after")
    def _participants(self):
        for key in ("local_steps", "step_size") if self.method == "fa-ld" else ():
            if key not in self.model_fields_set:
                raise PydanticCustomError("missing", "{key}", {"key": kebab(key)})
        if self.num_rounds * self.local_steps >= 2**31:
            raise ValueError("'num-rounds' times 'local-steps' must stay below 2^31")
        if (self.participation == "full") != (self.num_participants is None):
            raise ValueError(
                "'num-participants' is needed for, and only for, participation other than \"full\""
            )
        return self

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments for ``fald.sample``."""
        plain = {n: getattr(self, n) for n in ("num_rounds", "num_chains", "num_warmup", "thinning")}
        part = Participation(self.participation, self.num_participants, self.allow_unequal)
        if self.method == "fa-ld" and not self.options:
            return {**plain, **self._settings(*method_settings()), "participation": part}
        asked = part if "participation" in self.model_fields_set else None
        return {**plain, "method": self.build_method(), "participation": asked}

    def build_method(self) -> Method:
        """The method with its settings; ``options`` has those that only some methods take."""
        fields = SamplerSection.model_fields
        # written out studies have every key; a default says nothing that a method without it could mind
        known = takes(self.method) if self.method in METHODS else set()
        said = [n for n in method_settings() if n in known or getattr(self, n) != fields[n].default]
        given = self._settings(*[n for n in said if n in self.model_fields_set])
        return by_name(self.method, **given, **{k.replace("-", "_"): v for k, v in self.options.items()})

    def _settings(self, *names: str) -> dict[str, Any]:
        given = {name: getattr(self, name) for name in names}
        if isinstance(self.step_size, Decay):
            given["step_size"] = paper_decay(self.step_size.smoothness, self.step_size.strong_convexity)
        return given


class FitSection(Section):
    """Settings of the few-round methods, named as in ``fald.fit``; all may be left out."""

    accuracy: Literal["high", "medium"] | Annotated[float, Field(ge=0.005, le=0.5)] = "high"
    max_rounds: Annotated[int, Field(ge=3, lt=2**31)] = 12
    method: FitMethod = "auto"
    curvature: bool = True
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments for ``fald.fit``."""
        return {name: getattr(self, name) for name in FitSection.model_fields if name != "seed"}


class FederationSection(Section):
    """How a run on a federation treats sites that are slow or silent, and what it may see of them."""

    timeout: Annotated[float, Field(gt=0)] = 60.0
    opening_timeout: Annotated[float, Field(gt=0)] = 300.0
    dropout: Literal["fail", "retry", "reweight"] = "retry"
    retries: Annotated[int, Field(ge=0)] = 3
    first_replies: Annotated[int, Field(ge=1)] | None = None
    minimum_replies: Annotated[int, Field(ge=1)] | None = None
    secure_sum: bool | None = None

    @model_validator(mode="after")
    def _consistent(self):
        arrival = self.first_replies is not None or self.dropout == "reweight"
        if arrival and self.secure_sum:
            raise ValueError("a secure sum needs every site: leave out 'first-replies' and 'reweight'")
        if self.minimum_replies is not None and not arrival:
            raise ValueError("'minimum-replies' goes with 'first-replies' or dropout = \"reweight\"")
        if self.first_replies is not None and (self.minimum_replies or 0) > self.first_replies:
            raise ValueError("'minimum-replies' must be at most 'first-replies'")
        return self


class PrivacySection(Section):
    """A private run: what it may spend, and how its noise is drawn."""

    delta: Annotated[float, Field(gt=0, lt=1)]
    max_epsilon: Annotated[float, Field(gt=0)] | None = None
    client_noise: Literal["entropy", "seeded"] = "entropy"
    method: Annotated[str, AfterValidator(lambda name: ACCOUNTANTS[name] and name)] = "pld"


class Study(Question):
    """A whole study. ``folder`` is where relative paths of its files start."""

    fit: FitSection = Field(default_factory=FitSection)
    sampler: SamplerSection | None = None
    privacy: PrivacySection | None = None
    federation: FederationSection = Field(default_factory=FederationSection)
    folder: str = "."

    @field_validator("title")
    @classmethod
    def _plain_title(cls, title: str) -> str:
        return printable(title)

    @model_validator(mode="after")
    def _one_way(self):
        if self.sampler is not None and "fit" in self.model_fields_set:
            raise ValueError("'fit' (or --method) and 'sampler' are two ways to get a posterior; keep one")
        if self.privacy is not None and self.sampler is None:
            raise ValueError(
                "'privacy' needs a 'sampler' section: a private run is plain FA-LD, and choosing its "
                "settings from the rows would leak"
            )
        return self

    def require_sampler(self) -> SamplerSection:
        """The settings of FA-LD, or an error that says how to get some."""
        if self.sampler is None:
            raise ConfigError(
                "the study has no [sampler] section, and this is about FA-LD",
                hint="'fald plan STUDY --write' chooses one; without it 'fald run' needs no settings",
            )
        if self.sampler.method != "fa-ld":
            raise ConfigError(f"this is about FA-LD, and the study's method is {self.sampler.method!r}")
        return self.sampler

    def read_data(self) -> FederatedData:
        """Read and check the sites' files."""
        d, root = self.data, Path(self.folder)
        if d.file:
            if self.reader() is not None:
                raise ConfigError(
                    f"the model {self.model.family!r} reads files by itself, one for every site",
                    hint="name them in 'files' of [data]",
                )
            encoding = self.encoding()
            data = FederatedData.from_frame(read_table(root / d.file), site=d.site or "", **encoding)
            return data if d.bounds is None else data.bounded(*d.bounds)
        if not d.files:
            raise ConfigError(
                "the study names no files",
                hint="add 'files' or 'file' to [data], or run it where the rows are: fald run --federation",
            )
        return self.read_files({name: root / path for name, path in d.files.items()})

    @property
    def open_scales(self) -> bool:
        """Whether the priors are left to be relative to scales that the rows have.

        Not where they or the outcome's scale are declared, nor for plain FA-LD, whose sites know the prior
        before the first round.
        """
        m = self.model
        declared = any(given is not None for given in (m.prior_scale, m.noise_prior_scale, m.scales))
        return self.sampler is None and not declared and self.data.target not in self.data.scaling

    def with_scales(self, scales: Mapping[str, Any]) -> Study:
        """The same study with priors relative to these scales."""
        section = self.model.model_copy(update={"scales": Scales.model_validate(scales)})
        return self.model_copy(update={"model": section})

    def protection(self) -> Protection | None:
        """What the privacy section asks for; None without one."""
        if self.privacy is None:
            return None
        return Protection(**{name: getattr(self.privacy, name) for name in PrivacySection.model_fields})

    def require_any_sampler(self) -> SamplerSection:
        """The sampler section of a study that a chain is run for."""
        if self.sampler is None:
            raise ConfigError("the study has no [sampler] section")
        return self.sampler

    def as_settings(self) -> dict[str, Any]:
        """The whole study as plain values under its kebab-case keys."""
        left_out = {"fit"} if self.sampler is not None else set()
        left_out |= {"federation"} - self.model_fields_set
        return self.model_dump(by_alias=True, exclude_none=True, exclude=left_out)


def load_study(path: str | Path, overrides: Iterable[str] = ()) -> Study:
    """Read a study file and apply ``key=value`` overrides.

    Parameters
    ----------
    path
        The TOML file; relative paths in it start at its folder.
    overrides
        Settings such as ``"sampler.step-size=1e-4"``; the section may be left out where the key
        alone is clear.

    Raises
    ------
    ConfigError
        Naming the key, what is wrong with it, and the nearest right key.
    """
    path = Path(path)
    if not path.is_file():
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.toml")], 1)
        hint = f"did you mean {path.with_name(near[0])}?" if near else "'fald new' writes one to start from"
        raise ConfigError(f"no such study file: {path}", hint=hint)
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    if "folder" in tree:
        raise ConfigError(f"unknown key 'folder' ({path})", hint="paths in a study start at its own folder")
    overrides = list(overrides)
    for override in overrides:
        _apply(tree, override)
    where = f"{path} with --set" if overrides else str(path)
    return make_study({**tree, "folder": str(path.parent.resolve())}, where)


def make_study(tree: Mapping[str, Any], where: str) -> Study:
    """Check plain values and turn them into a ``Study``."""
    try:
        return Study.model_validate(tree)
    except ValidationError as error:
        raise _explain(error, where) from None


def _keys(section: type[BaseModel]) -> dict[str, Any]:
    return {f.alias or name: f.annotation for name, f in section.model_fields.items()}


_SECTIONS = {
    "data": DataSection,
    "model": ModelSection,
    "fit": FitSection,
    "sampler": SamplerSection,
    "privacy": PrivacySection,
    "federation": FederationSection,
}


def known_keys() -> list[str]:
    """Every key of a study, with its section."""
    return ["title", *[f"{name}.{key}" for name, section in _SECTIONS.items() for key in _keys(section)]]


def _apply(tree: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    key = key.strip()
    if not separator or not key:
        raise ConfigError(
            f"--set needs key=value; got {override!r}", hint="for example --set sampler.step-size=1e-4"
        )
    if "." not in key and key != "title":
        homes = [k for k in known_keys() if k.endswith(f".{key}")]
        if not homes:
            raise _unknown(key, "--set")
        # the section that the study has; "fit" is there even when it is not written
        present = [k for k in homes if k.partition(".")[0] in tree]
        key = (present or homes)[0]
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    *sections, last = key.split(".")
    here = tree
    for section in sections:
        here = here.setdefault(section, {})
        if not isinstance(here, dict):
            raise ConfigError(f"--set {key}: {section!r} is not a section")
    here[last] = value


def _unknown(key: str, where: str) -> ConfigError:
    known = known_keys()
    short = {k.rsplit(".", 1)[-1]: k for k in known}
    near = difflib.get_close_matches(key, known, 1, 0.5)
    near = near or [short[k] for k in difflib.get_close_matches(key.rsplit(".", 1)[-1], short, 1, 0.5)]
    return ConfigError(
        f"unknown key {key!r} ({where})",
        hint=f"did you mean {near[0]!r}?" if near else "see 'fald new' for all keys",
    )


def _explain(error: ValidationError, where: str) -> ConfigError:
    first = next((e for e in error.errors() if e["type"] == "extra_forbidden"), error.errors()[0])
    # a union reports each of its members; the path then ends in a type's name instead of a key
    parts = [
        str(p)
        for p in first["loc"]
        if not (isinstance(p, str) and (p[:1].isupper() or "[" in p or "float" in p))
    ]
    key = ".".join(parts)
    if first["type"] == "extra_forbidden":
        return _unknown(key, where)
    if first["type"] == "missing":
        key = ".".join([*parts, *first.get("ctx", {}).values()])
        return ConfigError(
            f"{key} is missing ({where})", hint="'fald new' shows every key with an explanation"
        )
    message = first["msg"].removeprefix("Value error, ")
    message = message[0].lower() + message[1:]
    got = "" if isinstance(first["input"], dict) else f"; got {first['input']!r}"
    between = " " if first["type"] == "rule" else ": "  # then it is the same sentence as everywhere
    return ConfigError(f"{key + between if key else ''}{message}{got} ({where})")
