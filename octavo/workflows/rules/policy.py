"""Does a checkpoint follow a policy.json: is it of that model, and is 16 bit what the policy keeps in 16 bit?"""

from __future__ import annotations

from pathlib import Path

from octavo.base.errors import CheckpointError
from octavo.formats.recipe import matches
from octavo.store.manifest import MANIFEST, Manifest
from octavo.store.policy import Policy
from octavo.workflows.rules.findings import Findings
from octavo.workflows.rules.model import Model


def check_policy(model: Model, path: Path, out: Findings) -> None:
    """Findings about the policy in `path`. CheckpointError or ConfigError if it is no policy."""
    policy = Policy.read(path)
    try:
        source = Manifest.load(model.checkpoint.folder).source
    except CheckpointError:
        source = ""
    if not source:
        text = (
            "No manifest tells which model this folder was made from, so whether the policy is of that model is open."
        )
        out.warn("policy-model-unknown", MANIFEST, text)
    elif source != policy.model_fingerprint:
        text = f"The policy is of another model: {policy.model_fingerprint[:19]}..., not {source[:19]}..."
        out.error("policy-model", str(path), text, "Give the policy of this model.")
    for pattern, entry in policy.exceptions():
        for name, module in model.modules.items():
            if entry.precision == "16bit" and module.quantized and matches(pattern, name):
                text = f"The policy keeps it in 16 bit, the folder holds FP8. {entry.reason}".strip()
                out.error("policy-broken", name, text, f"Quantize again: `octavo quantize MODEL OUT --policy {path}`.")
