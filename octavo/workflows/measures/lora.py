"""A LoRA step over an 8B Llama shape with random weights: FP8 with fused layers against BF16, built as well as we can.

r = 16 on all linears, sequences of 4,096 tokens, fused AdamW. The rival: Liger's loss and rotary embedding, compiled
layers, adapters in pure BF16 without float32 masters, which is a risk for accuracy that ours does not take; without
Liger it is not measured. The gate: logits and gradients of two fused layers are as near to the same codes in float32
as those of the layers one by one.
Memory is read after optimizer states exist.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import nn

from octavo.base.errors import OctavoError
from octavo.base.packages import version_of
from octavo.formats.measure import sqnr_db
from octavo.integrations.shaped import random_lora
from octavo.workflows.measures.timing import seconds

SEQUENCE, STEPS, GIB = 4096, 5, 2**30
# name -> how `random_lora` builds it, sequences a step, checkpointing
VARIANTS: dict[str, tuple[str, int, bool]] = {
    "best bf16, 2 sequences": ("best bf16", 2, False),
    "fp8 fused, 4 sequences": ("fused", 4, False),
    "fp8 fused, 4 sequences, checkpointing": ("fused", 4, True),
}
# dB that fused layers may lie further from float32. Both ways round the same inputs to FP8, so they have errors of one
# size, and not the same ones: a difference in BF16 moves codes at an edge. Fused, dY is rounded, too: at most twice the
# error.
ROOM_DB = {"logits": 1.0, "gradients": 3.0}


def rows(
    config: Mapping[str, Any], device: str, only: Iterable[str] = VARIANTS, sequence: int = SEQUENCE
) -> Iterator[dict[str, Any]]:
    """Tokens a second, peak GiB, GiB at rest. OctavoError where the gate says no."""
    db = check(config, device, min(sequence, 512))
    for name in only:
        kind, micro, checkpointing = VARIANTS[name]
        if kind == "best bf16" and version_of("liger_kernel") is None:
            yield {"what": name, "outcome": "not measured: pip install liger-kernel"}
            continue
        model = random_lora(config, kind, device, checkpointing)
        yield {"what": name, "db": db if kind == "fused" else None} | _measured(model, micro, sequence, device)
        del model
        gc.collect()
        torch.cuda.empty_cache()


def check(config: Mapping[str, Any], device: str, tokens: int) -> float:
    """dB of the logits of two fused layers against the same codes in float32. OctavoError where they lie too far."""
    exact, fused, single = (_results(config, kind, device, tokens) for kind in ("float32", "fused", "one by one"))
    for what, room in ROOM_DB.items():
        mine, theirs = (sqnr_db(found[what], exact[what]) for found in (fused, single))
        if not mine > theirs - room:
            raise OctavoError(
                f"gate of lora: {what} of fused layers against float32",
                got=f"{mine:.1f} dB",
                need=f"{theirs - room:.1f} dB: those of layers one by one have {theirs:.1f}",
                fix="Nothing is measured. Please report this with the output of octavo doctor.",
            )
    return round(sqnr_db(fused["logits"], exact["logits"]), 1)


def _results(config: Mapping[str, Any], kind: str, device: str, tokens: int) -> dict[str, torch.Tensor]:
    """Logits of two layers, and gradients of their adapters, of which no B is zero."""
    model = random_lora({**config, "num_hidden_layers": 2}, kind, device, False)
    generator = torch.Generator(device).manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator, device=device) * 0.01)
    ids = torch.randint(0, int(config["vocab_size"]), (1, tokens), generator=generator, device=device)
    with torch.autocast(device, torch.bfloat16, enabled=kind != "float32"):
        logits = cast(Any, model)(input_ids=ids).logits
    logits.float().square().mean().backward()
    gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return {"logits": logits.detach(), "gradients": gradients}


def _measured(model: nn.Module, micro: int, sequence: int, device: str) -> dict[str, Any]:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    vocabulary = int(cast(Any, model).get_input_embeddings().num_embeddings)
    ids = torch.randint(0, vocabulary, (micro, sequence), device=device)
    wide = any(parameter.dtype == torch.float32 for parameter in trained)

    def step() -> None:
        with torch.autocast(device, torch.bfloat16, enabled=wide):
            loss = cast(Any, model)(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    took = statistics.median(seconds(step) for _ in range(STEPS))
    sizes = {"peak_gib": torch.cuda.max_memory_allocated(), "at_rest_gib": torch.cuda.memory_allocated()}
    row: dict[str, Any] = {"tokens_s": round(micro * sequence / took), "step_ms": round(took * 1e3, 1)}
    return row | {name: round(size / GIB, 2) for name, size in sizes.items()}
