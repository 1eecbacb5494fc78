"""What a site allows: its own file, which the coordinator cannot change.

A site checks a study against its policy before anything about its rows leaves, and accepts or refuses the
whole of it. A refusal names what was asked and the key of the policy; it never contains a value of the data.
"""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from fald.core.errors import ConfigError, PolicyError
from fald.federation.secure.session import FEWEST_SITES
from fald.fewround.methods import FIT_METHODS
from fald.langevin.registry import METHODS, reveals_of
from fald.problem.families import FAMILIES, is_outside

FEW_ROWS = 5
_OUTSIDE = re.compile(r"[a-z0-9-]+:[^\s:]+")
_FEW_ROUND = {name for name, method in FIT_METHODS.items() if method.requests}


@dataclass(frozen=True)
class Enquiry:
    """What a study asks of one site.

    Attributes
    ----------
    columns
        Columns of the site's table that it reads.
    family
        Family of the model.
    method
        Name of the method; ``"auto"`` where a few-round method is chosen as the study goes.
    few_round
        Whether it is a few-round method, which asks for sums over rows at chosen parameters.
    curvature
        Whether second derivatives over the site's rows leave the site.
    secure_sum
        Whether all uploads go through a secure sum.
    rounds, chains, local_steps
        The most rounds it may take, the chains that advance in each, and the steps of each chain, or what
        else a method counts if that is more.
    sites
        How many sites the federation has by what the site itself knows; 0: it does not know.
    rows
        Rows of this site; 0 before they were looked at. Used at the site only.
    dim
        Number of parameters of the model.
    sums, declared
        Whether the server needs only sums of the uploads over sites, and whether the method says what it
        sends.
    epsilon, delta
        The most that the whole study may spend of the privacy of this site's records; None where it sets no
        limit, or has no privacy.
    """

    columns: tuple[str, ...]
    family: str
    method: str
    few_round: bool
    curvature: bool
    secure_sum: bool
    rounds: int
    chains: int
    rows: int = 0
    dim: int = 0
    local_steps: int = 1
    sites: int = 0
    epsilon: float | None = None
    delta: float | None = None
    sums: bool = True
    declared: bool = True

    @property
    def private(self) -> bool:
        """Whether it promises this site's records differential privacy with a limit."""
        return self.epsilon is not None and self.delta is not None and math.isfinite(self.epsilon)


class _Section(BaseModel):
    model_config = ConfigDict(
        alias_generator=lambda name: name.replace("_", "-"),
        populate_by_name=False,
        extra="forbid",
        frozen=True,
    )


class PrivacyPolicy(_Section):
    """Differential privacy that the site insists on."""

    required: bool = False
    max_epsilon: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    delta: Annotated[float, Field(gt=0, lt=1)] | None = None
    colluders: Annotated[int, Field(ge=0)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _budget_requires(cls, values: Any) -> Any:
        if isinstance(values, dict) and "max-epsilon" in values:
            if values.get("required") is False:
                raise ValueError("'max-epsilon' is no budget while studies without privacy are allowed")
            return {"required": True, **values}
        return values

    @model_validator(mode="after")
    def _together(self):
        if self.max_epsilon is not None and self.delta is None:
            raise ValueError("'max-epsilon' needs 'delta', at which it holds")
        if self.required and self.max_epsilon is None:
            raise ValueError("'required' needs 'max-epsilon': a study may promise an ε of any size")
        return self


class Policy(_Section):
    """A site's policy. Every key may be left out; without a file all are.

    Examples
    --------
    >>> policy = make_policy({"allowed-models": ["logistic"], "max-rounds": 100})
    >>> asked = Enquiry(columns=("y", "x"), family="linear", method="fa-ld", few_round=False,
    ...                  curvature=False, secure_sum=True, rounds=5000, chains=4, rows=50, dim=2)
    >>> policy.check(asked)
    Traceback (most recent call last):
        ...
    fald.core.errors.PolicyError: the site refuses the study: the model 'linear' (allowed-models);
    5000 rounds, more than 100 (max-rounds)
      hint: change the study, or ask the site to change its policy
    """

    allowed_columns: list[str] | None = None
    allowed_models: list[str] | None = None
    allowed_methods: list[str] | None = None
    minimum_rows: Annotated[int, Field(ge=1)] = 1
    curvature: bool = True
    unsummed: bool | None = None
    audit: bool = True
    allowed_subsets: list[list[str]] = Field(default_factory=list)
    max_rounds: Annotated[int, Field(ge=1)] = 100_000
    max_chains: Annotated[int, Field(ge=1)] = 1_000
    max_local_steps: Annotated[int, Field(ge=1)] = 10_000
    max_draws: Annotated[int, Field(ge=1)] = 2**18
    max_failed_opens: Annotated[int, Field(ge=1)] = 20
    max_studies: Annotated[int, Field(ge=1)] = 100
    max_seconds: Annotated[float, Field(gt=0, le=86400)] = 120.0
    max_megabytes: Annotated[int, Field(ge=1)] = 4096
    privacy: PrivacyPolicy = Field(default_factory=PrivacyPolicy)

    @field_validator("allowed_models", "allowed_methods")
    @classmethod
    def _known_names(cls, names: list[str] | None, info: Any) -> list[str] | None:
        known = tuple(FAMILIES) if info.field_name == "allowed_models" else (*FIT_METHODS, *METHODS)
        for name in names or []:
            # of a package that is not installed yet, or no more
            later = info.field_name == "allowed_models" and _OUTSIDE.fullmatch(name)
            if name not in known and not later:
                near = difflib.get_close_matches(name, known, 1)
                raise ValueError(
                    f"{name!r} is not known" + (f"; did you mean {near[0]!r}?" if near else f": {known}")
                )
        return names

    def check(self, task: Enquiry) -> None:
        """Refuse a study that the policy does not allow, whatever the rows are.

        Parameters
        ----------
        task
            What the study asks.

        Raises
        ------
        PolicyError
            With everything that is refused, each with the key of the policy that says so.
        """
        refused = [*self._refused_study(task), *self._refused_uploads(task), *self._refused_privacy(task)]
        if refused:
            raise PolicyError(
                "the site refuses the study: " + "; ".join(refused),
                hint="change the study, or ask the site to change its policy",
            )

    def check_model(self, family: str) -> None:
        """Refuse a model of an installed package that the policy does not name; nothing is imported yet."""
        if not self._allows_model(family):
            raise PolicyError(
                f"the site refuses the study: the model {family[:80]!r} (allowed-models)",
                hint="a model that is not part of fald must be named in the site's policy",
            )

    def _allows_model(self, family: str) -> bool:
        if self.allowed_models is None:
            return not is_outside(family)
        return family in self.allowed_models

    def check_rows(self, task: Enquiry) -> None:
        """Refuse a study that asks for fewer rows than the site wants to have."""
        if task.rows < self.minimum_rows:
            raise PolicyError("it has fewer rows than it wants to have to take part (minimum-rows)")

    def warnings(self, task: Enquiry) -> list[str]:
        """What the people at the site should know before they take part."""
        if task.secure_sum or task.private or task.rows > max(task.dim, FEW_ROWS):
            return []
        return [
            f"this site has at most {max(task.dim, FEW_ROWS)} rows for {task.dim} parameters: what it sends "
            "can reveal single rows. A secure sum (three sites or more) or a [privacy] section in the study "
            "hides them; 'minimum-rows' or 'unsummed = false' in the site's policy refuses such studies"
        ]

    def _refused_study(self, task: Enquiry) -> list[str]:
        found = []
        if self.allowed_columns is not None:
            odd = sorted(set(task.columns) - set(self.allowed_columns))
            if odd:
                word = "column" if len(odd) == 1 else "columns"
                found.append(f"the {word} {', '.join(map(repr, odd))} (allowed-columns)")
        if not self._allows_model(task.family):
            found.append(f"the model {task.family!r} (allowed-models)")
        if self.allowed_methods is not None and not self._allows_method(task.method):
            found.append(f"the method {task.method!r} (allowed-methods)")
        for asked, most, what in (
            (task.rounds, self.max_rounds, "rounds"),
            (task.chains, self.max_chains, "chains"),
            (task.local_steps, self.max_local_steps, "local-steps"),
        ):
            if asked > most:
                found.append(f"{asked} {what.replace('-', ' ')}, more than {most} (max-{what})")
        return found

    def _allows_method(self, method: str) -> bool:
        allowed = set(self.allowed_methods or ())
        if "auto" in allowed:
            allowed |= _FEW_ROUND
        # "auto" may choose any of the others
        return method in allowed or (method == "auto" and _FEW_ROUND - {"auto"} <= allowed)

    def _refused_uploads(self, task: Enquiry) -> list[str]:
        found = []
        if not task.declared:
            found.append(f"the method {task.method!r}, which does not declare what it sends (reveals)")
        if task.secure_sum and not task.sums:
            found.append(
                f"a secure sum of the uploads of {task.method!r}, which are more than sums (secure-sum)"
            )
        declared = not task.few_round and task.method in METHODS and reveals_of(task.method).curvature
        if (task.curvature or declared) and not self.curvature:
            found.append("second derivatives over its rows (curvature)")
        # of two sites each knows the other's part of a sum, so that a secure sum hides nothing
        unsummed = 0 < task.sites < FEWEST_SITES if self.unsummed is None else self.unsummed
        if not task.secure_sum and not unsummed:
            found.append("uploads that do not go through a secure sum (unsummed)")
        return found

    def _refused_privacy(self, task: Enquiry) -> list[str]:
        p = self.privacy
        if task.epsilon is None or task.delta is None or not task.private:
            what = "without differential privacy" if task.delta is None else "that sets no limit to its ε"
            return [f"a study {what} (privacy.required)"] if p.required else []
        found = []
        if p.max_epsilon is not None and not task.epsilon <= p.max_epsilon:
            found.append(f"ε = {task.epsilon:.4g}, more than {p.max_epsilon:g} (privacy.max-epsilon)")
        if p.delta is not None and not task.delta <= p.delta:
            found.append(f"δ = {task.delta:g}, more than {p.delta:g} (privacy.delta)")
        return found


def read_policy(path: str | Path | None) -> Policy:
    """Read a site's policy; without a path, the one that allows what is not written down.

    Parameters
    ----------
    path
        The TOML file.

    Raises
    ------
    ConfigError
        If there is no such file, or a key is unknown or out of its range: a site never goes on with a policy
        that it cannot read.

    Examples
    --------
    >>> read_policy(None).minimum_rows
    1
    """
    if path is None:
        return Policy()
    path = Path(path)
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the policy {path}: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    return make_policy(tree, str(path))


def make_policy(tree: Mapping[str, Any], where: str = "policy") -> Policy:
    """Check plain values and turn them into a ``Policy``."""
    try:
        return Policy.model_validate(tree)
    except ValidationError as error:
        raise _explain(error, where) from None


def policy_keys() -> list[str]:
    """All keys of a policy, with their section."""
    own = [str(field.alias) for name, field in Policy.model_fields.items() if name != "privacy"]
    return [*own, *[f"privacy.{field.alias}" for field in PrivacyPolicy.model_fields.values()]]


def _explain(error: ValidationError, where: str) -> ConfigError:
    first = next((e for e in error.errors() if e["type"] == "extra_forbidden"), error.errors()[0])
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        near = difflib.get_close_matches(key, policy_keys(), 1, 0.5)
        hint = f"did you mean {near[0]!r}?" if near else "keys: " + ", ".join(policy_keys())
        return ConfigError(f"unknown key {key!r} ({where})", hint=hint)
    message = first["msg"].removeprefix("Value error, ")
    got = "" if isinstance(first["input"], dict | list) else f"; got {first['input']!r}"
    return ConfigError(f"{key}: {message[0].lower()}{message[1:]}{got} ({where})")
