"""Octavo: FP8 for language models, from fine-tuning to serving, on the GPU you have.

The public names are resolved on first use (PEP 562): `import octavo` loads neither torch nor transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.base.errors import OctavoError as OctavoError
    from octavo.formats.granularity import PerBlock as PerBlock
    from octavo.formats.granularity import PerGroup as PerGroup
    from octavo.formats.granularity import PerRow as PerRow
    from octavo.formats.granularity import PerTensor as PerTensor
    from octavo.formats.recipe import Recipe as Recipe
    from octavo.formats.rule import Rule as Rule
    from octavo.formats.scaled import ScaledTensor as ScaledTensor
    from octavo.formats.spec import E4M3 as E4M3
    from octavo.formats.spec import E5M2 as E5M2
    from octavo.integrations.decoding import Decoder as Decoder
    from octavo.integrations.float8_cache import Float8Cache as Float8Cache
    from octavo.integrations.quantizer import OctavoConfig as OctavoConfig
    from octavo.integrations.transformers import load as load
    from octavo.modules.convert import convert as convert
    from octavo.modules.explain import explain as explain
    from octavo.modules.frozen import FrozenFloat8Linear as FrozenFloat8Linear
    from octavo.modules.linear import Float8Linear as Float8Linear
    from octavo.ops.backends import why as why
    from octavo.ops.matmul import scaled_mm as scaled_mm
    from octavo.ops.quantize import dequantize as dequantize
    from octavo.ops.quantize import quantize as quantize
    from octavo.store.snapshot.snapshots import Snapshots as Snapshots
    from octavo.store.snapshot.state import TrainingState as TrainingState
    from octavo.workflows.calibrate import calibrate as calibrate
    from octavo.workflows.evaluate import evaluate as evaluate
    from octavo.workflows.export import export as export
    from octavo.workflows.finetune import finetune as finetune
    from octavo.workflows.plan import plan as plan
    from octavo.workflows.verify import verify as verify

_HOME = {
    "load": "octavo.integrations.transformers",
    "Decoder": "octavo.integrations.decoding",
    "Float8Cache": "octavo.integrations.float8_cache",
    "OctavoConfig": "octavo.integrations.quantizer",
    "OctavoError": "octavo.base.errors",
    "E4M3": "octavo.formats.spec",
    "E5M2": "octavo.formats.spec",
    "PerTensor": "octavo.formats.granularity",
    "PerRow": "octavo.formats.granularity",
    "PerGroup": "octavo.formats.granularity",
    "PerBlock": "octavo.formats.granularity",
    "Rule": "octavo.formats.rule",
    "Recipe": "octavo.formats.recipe",
    "ScaledTensor": "octavo.formats.scaled",
    "quantize": "octavo.ops.quantize",
    "dequantize": "octavo.ops.quantize",
    "scaled_mm": "octavo.ops.matmul",
    "why": "octavo.ops.backends",
    "explain": "octavo.modules.explain",
    "FrozenFloat8Linear": "octavo.modules.frozen",
    "Float8Linear": "octavo.modules.linear",
    "convert": "octavo.modules.convert",
    "Snapshots": "octavo.store.snapshot.snapshots",
    "TrainingState": "octavo.store.snapshot.state",
    "calibrate": "octavo.workflows.calibrate",
    "evaluate": "octavo.workflows.evaluate",
    "export": "octavo.workflows.export",
    "finetune": "octavo.workflows.finetune",
    "plan": "octavo.workflows.plan",
    "verify": "octavo.workflows.verify",
}

__all__ = [*_HOME]
__version__ = "0.1.0.dev0"


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'octavo' has no attribute '{name}'")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*_HOME, "__version__"])
