"""Before a byte is converted: what the engines will say about the folder that a plan describes. Headers only."""

from __future__ import annotations

from typing import Any

from octavo.base.errors import RefusedError
from octavo.store.header import TensorInfo
from octavo.store.tensors import Checkpoint
from octavo.store.writer import Entries
from octavo.workflows.rules.engine import Target
from octavo.workflows.rules.files import check_tensors
from octavo.workflows.rules.findings import Finding, Findings, verdict
from octavo.workflows.rules.judge import ENGINES, Judgement, judge, parse_version
from octavo.workflows.rules.model import Model
from octavo.workflows.rules.scheme import read_scheme

# Where nothing but the files decides: FP8 units, every kernel there is, nothing split.
ANYWHERE = ((9, 0), 1)


def planned_model(source: Checkpoint, entries: Entries, quantization: dict[str, Any]) -> Model:
    """The folder that writing `entries` with this quantization_config would give, by names, shapes and dtypes."""
    tensors = {name: TensorInfo(dtype, shape, "", 0) for name, (dtype, shape) in entries.items()}
    return Model(Checkpoint(source.folder, tensors, {**source.config, "quantization_config": quantization}, []))


def judge_planned(model: Model, target: Target) -> tuple[list[Finding], Judgement]:
    """Findings of one engine on one GPU, worst first, and its kernels."""
    out = Findings(target.engine)
    check_tensors(model, out)
    judgement = judge(target.engine, model, read_scheme(model.checkpoint, out), target, out)
    order = ("error", "warn", "info")
    return sorted(out.all(), key=lambda finding: order.index(finding.severity)), judgement


class Foresight:
    """`examine` of a conversion: what each engine will say. RefusedError, before a byte is written, if none loads."""

    def __init__(self, source: Checkpoint) -> None:
        self.source = source
        self.engines: dict[str, str] = {}

    def __call__(self, entries: Entries, quantization: dict[str, Any]) -> None:
        """Fills `engines`: engine -> `ok` or `error: CODE: message`."""
        self.engines = judge_everywhere(planned_model(self.source, entries, quantization))
        if all(said != "ok" for said in self.engines.values()):
            got = "; ".join(f"{engine}: {said}" for engine, said in self.engines.items())
            fix = "`octavo requantize MODEL OUT --for ENGINE:GPU` chooses what loads there."
            raise RefusedError("no engine could load the result", got=got, fix=fix)


def judge_everywhere(model: Model) -> dict[str, str]:
    """Engine -> `ok`, or `error: CODE: message` of the first thing that stops its newest release."""
    sm, tp = ANYWHERE
    said = {}
    for engine, rules in ENGINES.items():
        found, _ = judge_planned(model, Target(engine, parse_version(rules.NEWEST), sm, tp))
        worst = verdict(found)
        said[engine] = "ok" if worst != "error" else f"error: {found[0].code}: {found[0].message}"
    return said
