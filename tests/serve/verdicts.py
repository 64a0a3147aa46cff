"""Checkpoints for the question whether verify says what vLLM does: good ones, and one defect each.

Weights are loud: blocks of rows and columns differ by factors, so that a scale which lands in the wrong place shows in
the answer far above the rounding of FP8.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.workflows.broken import Folder, decoder, native_config, quantize

Change = Callable[[Folder], object]
A0, M0 = "model.layers.0.self_attn", "model.layers.0.mlp"
Q, K, V, OUT = (f"{A0}.{leaf}_proj" for leaf in "qkvo")
GATE, UP, DOWN = (f"{M0}.{leaf}_proj" for leaf in ("gate", "up", "down"))


def loud(*arguments: Any, **more: Any) -> Folder:
    folder = decoder(*arguments, **more)
    generator = torch.Generator().manual_seed(3)
    for name, x in folder.tensors.items():
        if name == "lm_head.weight" or (folder.config["tie_word_embeddings"] and "embed" in name):
            folder.tensors[name] = (x.float() * 6).bfloat16()
        elif "embed" in name:
            folder.tensors[name] = (x.float() * 20).bfloat16()
        elif name.removesuffix(".weight") in folder.linears:
            rows, cols = x.shape
            factors = torch.tensor([0.5, 1.0, 3.0])
            by_row = factors[torch.randint(0, 3, (-(-rows // 64),), generator=generator)].repeat_interleave(64)[:rows]
            by_col = factors[torch.randint(0, 3, (-(-cols // 64),), generator=generator)].repeat_interleave(64)[:cols]
            folder.tensors[name] = (x.float() * by_row[:, None] * by_col).bfloat16()
    return folder


def drop(name: str) -> Change:
    return lambda f: f.tensors.pop(name)


def edit(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    def apply(f: Folder) -> None:
        for found in [n for n in f.tensors if n.endswith(name)]:
            f.tensors[found] = change(f.tensors[found])

    return apply


def renamed(old: str, new: str) -> Change:
    return lambda f: f.rename(old, new)


def config(**values: Any) -> Change:
    return lambda f: f.quant.update(values)


def without(key: str) -> Change:
    return lambda f: f.quant.pop(key)


def group(f: Folder) -> dict[str, Any]:
    return f.quant["config_groups"]["group_0"]


def transposed(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8).t().contiguous().view(torch.float8_e4m3fn)


def merged_codes(x: torch.Tensor) -> torch.Tensor:
    """An adapter's update added to the codes as if they were weights."""
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(1)) * 200
    return (x.float() + noise).clamp(-448, 448).to(torch.float8_e4m3fn)


def both(*changes: Change) -> Change:
    return lambda f: [change(f) for change in changes]


def two_shards(f: Folder) -> None:
    f.two_shards(lambda name: ".mlp." in name)


def unlisted_shard(f: Folder) -> None:
    last = f.two_shards(lambda name: ".mlp." in name)[1]
    f.index = {name: file for name, file in (f.index or {}).items() if file != last}


def cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def lost_shard(folder: Path) -> None:
    (folder / "model-00002-of-00002.safetensors").unlink()


def kv_cache(*leaves: str, shape: tuple[int, ...] = (1,)) -> Change:
    def apply(f: Folder) -> None:
        scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
        f.quant["kv_cache_scheme"] = scheme
        f.tensors |= {f"{A0}.{leaf}": torch.full(shape, 0.05) for leaf in leaves}

    return apply


def fp8_head(kind: str) -> Callable[[Folder], Folder]:
    def make(f: Folder) -> Folder:
        f.linears.append("lm_head")
        return quantize(f, kind, skip=[])

    return make


def keeping(kind: str, keep: list[str], skip: list[str] | None = None) -> Callable[[Folder], Folder]:
    return lambda f: quantize(f, kind, keep=keep, skip=skip)


def second_layer(f: Folder) -> None:
    found = {n.replace("layers.0", "layers.1"): x.clone() for n, x in f.tensors.items() if "layers.0" in n}
    f.tensors |= found


@dataclass(frozen=True)
class Case:
    """good: whether it serves what was stored. kind: of `quantize`, or what to do with the 16-bit folder instead.

    change: to the folder in memory. after: to the written one. model: arguments of `decoder`.
    """

    good: bool
    kind: str | Callable[[Folder], Folder] = "ct-channel"
    change: Change | None = None
    after: Callable[[Path], None] | None = None
    model: tuple[tuple[str, Any], ...] = ()

    def write(self, path: Path) -> Path:
        folder = loud(**dict(self.model))
        folder = self.kind(folder) if callable(self.kind) else quantize(folder, self.kind)
        if self.change is not None:
            self.change(folder)
        folder.write(path)
        if self.after is not None:
            self.after(path)
        return path


TIED = (("tie", True),)
ONE_HEAD = (("kv", 1),)
CASES = {
    "block": Case(True, "block"),
    "ct block": Case(True, "ct-block"),
    "ct channel": Case(True),
    "static": Case(True, "static"),
    "ct tensor": Case(True, "ct-tensor"),
    "tied head": Case(True, "block", model=TIED),
    "ragged channels": Case(True, model=(("inter", 320), ("kv", 1))),
    "two shards": Case(True, "block", two_shards),
    "bf16 scales": Case(True, "block", edit("weight_scale_inv", lambda s: s.bfloat16())),
    "o in 16 bit, full name": Case(True, keeping("block", [OUT])),
    "q, k, v in 16 bit, merged name": Case(True, keeping("ct-channel", [Q, K, V], ["lm_head", f"{A0}.qkv_proj"])),
    "head targeted by name": Case(True, fp8_head("ct-channel"), lambda f: group(f)["targets"].append("re:.*lm_head")),
    "targets by pattern": Case(True, change=lambda f: group(f).update(targets=["re:.*proj$"])),
    "weight-only": Case(True, change=lambda f: group(f).update(input_activations=None)),
    "KV scales": Case(True, change=kv_cache("k_proj.k_scale", "v_proj.v_scale")),
    # ------------------------------------------------------------------------------------ vLLM boots and talks nonsense
    "scale missing": Case(False, "block", drop(f"{DOWN}.weight_scale_inv")),
    "reciprocal": Case(False, "block", edit("weight_scale_inv", lambda s: 1 / s)),
    "scale times 448": Case(False, change=edit("weight_scale", lambda s: s * 448)),
    "codes merged on": Case(False, "block", edit(f"{DOWN}.weight", merged_codes)),
    "E8M0 as bytes": Case(
        False,
        lambda f: quantize(f, "block", po2=True),
        edit("weight_scale_inv", lambda s: s.to(torch.float8_e8m0fnu).view(torch.uint8)),
    ),
    "transposed": Case(False, change=edit(f"{OUT}.weight", transposed)),
    "o in 16 bit, short name": Case(False, keeping("block", [OUT], ["lm_head", "o_proj"])),
    "16 bit called FP8": Case(False, lambda f: f, lambda f: f.config.update(quantization_config=native_config([]))),
    "shard not in index": Case(False, change=unlisted_shard),
    "no head": Case(False, change=drop("lm_head.weight")),
    # --------------------------------------------------------------------------------------------------- vLLM refuses
    "k alone in 16 bit": Case(False, keeping("block", [K])),
    "k alone ignored": Case(False, keeping("ct-channel", [K])),
    "scale named for the other layout": Case(False, "ct-block", renamed("_scale", "_scale_inv")),
    "scale of one dimension": Case(False, change=edit(f"{Q}.weight_scale", lambda s: s[:, 0])),
    "scale 1x1": Case(False, "ct-tensor", edit("weight_scale", lambda s: s.reshape(1, 1))),
    "rectangle transposed": Case(False, change=edit(f"{DOWN}.weight", transposed)),
    "half a block in k": Case(False, "block", model=ONE_HEAD),
    "block and static": Case(False, "block", config(activation_scheme="static")),
    "block without activations": Case(False, "ct-block", lambda f: group(f).update(input_activations=None)),
    "unknown key": Case(False, change=lambda f: group(f)["weights"].update(odd=1)),
    "unknown method": Case(False, "block", config(quant_method="float8")),
    "stored per tensor, declared per channel": Case(
        False, "ct-tensor", lambda f: group(f)["weights"].update(strategy="channel")
    ),
    "FP8 head": Case(False, fp8_head("block")),
    "second layer": Case(False, change=second_layer),
    "stray tensor": Case(False, change=lambda f: f.tensors.update({f"{A0}.extra.weight": torch.ones(4)})),
    "KV scales under other names": Case(False, change=kv_cache("key_scale", "value_scale")),
    "KV scales of old converters": Case(False, change=kv_cache("k_proj.output_scale", "v_proj.output_scale")),
    "truncated": Case(False, "block", after=cut),
    "lost shard": Case(False, "block", two_shards, lost_shard),
}
