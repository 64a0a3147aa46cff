"""policy.json: which layers of a model stay in 16 bit or take another scheme, and why; tied to that model.

`octavo tune` writes it from measurements, every fine-tune writes the one it trained with; quantize, load, finetune,
export and verify honour it. A module that it does not name gets what the recipe says.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

import pydantic

from octavo.base.errors import CheckpointError, ConfigError, MismatchError, did_you_mean, require_type
from octavo.base.report import UNREADABLE, Config, Report, config_error, read_json
from octavo.formats.architectures import expert_block, fused_group, role
from octavo.formats.recipe import PRESETS, QUANTIZED_ROLES, Recipe
from octavo.formats.rule import Rule
from octavo.store.manifest import fingerprint
from octavo.store.tensors import Checkpoint

POLICY = "policy.json"
POLICY_VERSION = 1
PRECISIONS = ("fp8", "16bit")

Settings = TypeVar("Settings", bound=Config)


class PolicyEntry(Report):
    """One module, or all experts of a layer (`...mlp.experts.*`).

    precision: `fp8` or `16bit`. scheme: the preset that an FP8 module takes, empty for the one of the whole model.
    rule, reason: in words. kl: what the module, with those that are decided together with it, adds to the divergence
    when it alone is FP8, nats per token, as far as that was measured.
    """

    precision: Literal["fp8", "16bit"]
    scheme: str = ""
    rule: str = ""
    reason: str = ""
    kl: float | None = None


class Policy(Report):
    """The file. model_fingerprint: `octavo.store.manifest.fingerprint` of the 16-bit model, empty: of no model.

    scheme: the preset that it was tuned for, empty: any. measured: what the tuning measured, for people.
    """

    schema_version: int = POLICY_VERSION
    model_fingerprint: str = ""
    scheme: str = ""
    measured: dict[str, Any] = pydantic.Field(default_factory=dict)
    modules: dict[str, PolicyEntry]

    @classmethod
    def read(cls, path: Path | str) -> Self:
        """The file alone, whatever model it is of. CheckpointError or ConfigError naming what is wrong in it."""
        require_type("policy", path, str, Path)
        path = Path(path)
        try:
            values = read_json(path, unique=True)
        except FileNotFoundError:
            raise CheckpointError(f"policy {path} does not exist", fix="Make it with: octavo tune MODEL") from None
        except UNREADABLE as error:
            raise CheckpointError(f"{path} is not a policy", got=" ".join(str(error).split())[:200]) from None
        if not isinstance(values, dict) or not isinstance(values.get("modules"), dict):
            raise CheckpointError(f"{path} is not a policy", need="an object with schema_version and modules")
        if values.get("schema_version") != POLICY_VERSION:
            got = str(values.get("schema_version"))
            raise CheckpointError(f"{path}: schema_version", got=got, need=str(POLICY_VERSION))
        for name, entry in values["modules"].items():
            precision = entry.get("precision") if isinstance(entry, dict) else None
            if isinstance(precision, str) and precision not in PRECISIONS:
                fix = did_you_mean(precision, PRECISIONS)
                raise ConfigError(f"{path}: {name}: precision '{precision}' is unknown", fix=fix)
        try:
            policy = cls(**values)
        except pydantic.ValidationError as error:
            raise config_error(error, {*cls.model_fields, *PolicyEntry.model_fields}, str(path)) from None
        for name, scheme in [("scheme", policy.scheme), *((n, e.scheme) for n, e in policy.modules.items())]:
            if scheme and scheme not in PRESETS:
                raise ConfigError(f"{path}: {name}: scheme '{scheme}' is unknown", fix=did_you_mean(scheme, PRESETS))
        return policy

    @classmethod
    def load(cls, path: Path | str, *, model: Checkpoint) -> Self:
        """The file, for use with `model`, in 16 bit. MismatchError if it is another model's or names what is not there.

        ConfigError where it asks for what engines cannot run: shards of one fused matrix in different ways, FP8 for an
        embedding or a norm.
        """
        policy = cls.read(path)
        if not policy.model_fingerprint:
            raise MismatchError(f"{path} is not tied to a model", fix="Make it with: octavo tune MODEL")
        if (found := fingerprint(model)) != policy.model_fingerprint:
            raise MismatchError(
                f"{path} is of another model",
                got=f"{found[:19]}... in {model.folder}",
                need=f"{policy.model_fingerprint[:19]}...",
                fix="Run octavo tune on this model.",
            )
        policy._check(Path(path), model.shapes(), model.layers)
        return policy

    def _check(self, path: Path, shapes: Mapping[str, tuple[int, ...]], layers: int | None) -> None:
        known = {tensor.removesuffix(".weight"): role(tensor, shape, layers) for tensor, shape in shapes.items()}
        blocks = {block for module in known if (block := expert_block(module))}
        shards: dict[str, tuple[str, PolicyEntry]] = {}
        for name, entry in self.modules.items():
            if name not in known and name.removesuffix(".*") not in blocks and expert_block(name) not in blocks:
                raise MismatchError(f"{path} names '{name}'", got="no such module", fix=did_you_mean(name, known))
            if entry.precision == "fp8" and known.get(name, "expert") not in QUANTIZED_ROLES:
                what = f"{path} wants {name} in FP8"
                raise ConfigError(what, got=f"a module of role '{known[name]}'", need="16bit: engines run no other")
            unit = unit_of(name)
            first, other = shards.setdefault(unit, (name, entry))
            if (other.precision, other.scheme) != (entry.precision, entry.scheme):
                what = f"{path} treats {first} and {name} differently"
                raise ConfigError(what, need="one precision for both: engines fuse them", fix="Change one of the two.")

    def exceptions(self) -> Iterator[tuple[str, PolicyEntry]]:
        """The entries that are not what the recipe does anyway, one for each module they reach."""
        for name, entry in self.modules.items():
            if entry.precision == "16bit" or entry.scheme not in ("", self.scheme):
                fused = fused_group(name)
                yield from ((shard, entry) for shard in (fused[1] if fused else (name,)))

    def apply(self, recipe: Recipe) -> Recipe:
        """The recipe with these exceptions; what it skips stays skipped. MismatchError: not the scheme it is for."""
        if self.scheme and recipe.name != self.scheme:
            fix = f"Use scheme {self.scheme}, or tune for {recipe.name}."
            raise MismatchError(f"a policy tuned for scheme {self.scheme}", got=f"scheme {recipe.name}", fix=fix)
        overrides: dict[str, Rule | None] = {}
        for name, entry in self.exceptions():
            kept = entry.precision == "16bit"
            overrides[name] = None if kept else recipe.rule.per(PRESETS[entry.scheme].rule.granularity)
        return replace(recipe, overrides=(*overrides.items(), *recipe.overrides))

    def adopt(self, settings: Settings) -> Settings:
        """Settings that name no scheme, with the one this policy was tuned for."""
        if not self.scheme or "scheme" in settings.model_fields_set:
            return settings
        return settings.model_copy(update={"scheme": self.scheme})


def unit_of(module: str) -> str:
    """What is decided together with a module, by name: the experts of its layer, its fused siblings, or itself."""
    block = expert_block(module)
    if block is not None:
        return f"{block}.*"
    fused = fused_group(module)
    return fused[0] if fused else module
