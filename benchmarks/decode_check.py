"""Whole models on a CUDA device: what generates, from which stream and device, and how long kernels take to compile.

    python benchmarks/decode_check.py [--model FOLDER] [--only NAME ...]

--model: a real Llama, for the tokens of greedy decoding; else one with random weights. Exit code 1 where a check fails.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    CLIPVisionConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    Qwen3MoeConfig,
)

sys.path.insert(0, str(Path(__file__).parents[1]))

import octavo
from octavo import Rule
from octavo.base.hardware import caps_of
from octavo.integrations.decoding import Decoder
from octavo.integrations.float8_cache import Float8Cache
from octavo.integrations.measuring import cache_argument, new_cache
from octavo.integrations.shaped import random_model
from octavo.integrations.transformers import load
from octavo.modules.experts import FrozenFloat8Experts
from octavo.ops.attention import attend
from octavo.ops.graphs import capture
from octavo.ops.linear import linear
from octavo.testing import assert_sqnr
from octavo.workflows.bench import MODEL
from octavo.workflows.measures import kv
from octavo.workflows.planner.source import published

DEVICE, NEW, NEAR = "cuda", 24, 0.02
QUESTIONS = ("The capital of France is", "The sea was calm that morning, and")
TEXT = {"vocab_size": 264, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "hidden_size": 128, "intermediate_size": 256}  # fmt: skip
COLD = """
import sys, time
sys.path.insert(0, {root!r})
import torch
sys.path.insert(0, {root!r} + "/benchmarks")
from decode_check import fresh_model
from octavo.kernels.cuda import loader
from octavo.integrations.decoding import Decoder
torch.zeros(1, device="cuda"); loader.nvrtc_version(); loader._core()
spent, inside = [0.0], [0]
load, warm_up = loader.load, loader.warm_up

def timed(function):
    def run(*args):
        begin, outermost = time.perf_counter(), not inside[0]
        inside[0] += 1
        try:
            return function(*args)
        finally:
            inside[0] -= 1
            spent[0] += outermost * (time.perf_counter() - begin)
    return run

model = fresh_model()
loader.load, loader.warm_up = timed(load), timed(warm_up)
Decoder(model, capacity=512).warmup(prompt=128)
torch.cuda.synchronize()
print(len(list(loader.cache_folder().iterdir())), spent[0])
"""


def fresh_model() -> nn.Module:
    """Two layers of an 8B shape in FP8: every kernel that all of them need."""
    return random_model(published()[MODEL] | {"num_hidden_layers": 2}, "fp8", DEVICE)


def same_tokens(folder: str) -> str:
    """A decoder in graphs, of the prompt and of a step, says what Transformers' own loop says, up to where two tokens
    are as likely."""
    notes = []
    for dtype, kv_cache in ((torch.float16, "16bit"), (torch.bfloat16, "token-head")):
        model: Any = load(folder, "channel", activation="none", dtype=dtype, device=DEVICE).eval()
        equal = total = 0
        for ids in prompts(folder, model):
            options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW, "do_sample": False}
            cache = new_cache(model) if kv_cache == "16bit" else Float8Cache(model, granularity=kv_cache)
            want = model.generate(input_ids=ids, pad_token_id=0, **{cache_argument(model): cache}, **options)[0]
            decoder = Decoder(model, capacity=128 + NEW, kv_cache=kv_cache).warmup(prompt=ids.shape[1])
            found = model.generate(input_ids=ids, pad_token_id=0, custom_generate=decoder, **options)[0]
            length = min(len(found), len(want))
            differs = (found[:length] != want[:length]).nonzero()
            place = int(differs[0]) if len(differs) else length
            equal, total = equal + place - ids.shape[1], total + length - ids.shape[1]
            if place < length:
                assert_near_tie(model, want[:place], int(found[place]), int(want[place]))
        notes.append(f"{dtype} {kv_cache}: {equal} of {total} tokens before a tie")
    return ", ".join(notes)


def assert_near_tie(model: Any, before: torch.Tensor, found: int, want: int) -> None:
    with torch.no_grad():
        logits = model(input_ids=before[None]).logits[0, -1].float()
    gap = float((logits.max() - logits[[found, want]]).max() / (logits.max() - logits.median()))
    assert gap < NEAR, f"after {len(before)} tokens {found} for {want}, {gap:.3f} of the logits' range apart"


def prompts(folder: str, model: Any) -> list[torch.Tensor]:
    if not (Path(folder) / "tokenizer_config.json").is_file():
        return [torch.randint(4, model.config.vocab_size, (1, 20), device=DEVICE) for _ in QUESTIONS]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return [tokenizer(text, return_tensors="pt")["input_ids"].to(DEVICE) for text in QUESTIONS]


def experts_and_towers(folder: str) -> str:
    """A mixture of experts and a vision-language wrapper from files: logits as on the CPU; tokens; steps that read an
    FP8 cache against one pass through it."""
    moe = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "decoder_sparse_step": 1}
    tower = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision = CLIPVisionConfig(image_size=16, patch_size=8, **tower)
    wrapper = LlavaConfig(vision_config=vision, text_config=LlamaConfig(**TEXT), image_token_index=263)
    ids = torch.randint(4, 260, (1, 9))
    seen = ids.clone()
    seen[0, 1:5] = 263
    found = []
    for config, kind, inputs in (
        (Qwen3MoeConfig(**TEXT, **moe), AutoModelForCausalLM, {"input_ids": ids}),
        (wrapper, AutoModelForImageTextToText, {"input_ids": seen, "pixel_values": torch.randn(1, 3, 16, 16)}),
    ):
        with tempfile.TemporaryDirectory() as place:
            kind.from_config(config).to(torch.bfloat16).save_pretrained(place)
            here, there = (
                load(place, "channel", activation="none", dtype=dtype, device=device).eval()
                for dtype, device in ((torch.bfloat16, DEVICE), (torch.float32, "cpu"))
            )
        put = {name: x.to(DEVICE, torch.bfloat16 if x.is_floating_point() else x.dtype) for name, x in inputs.items()}
        with torch.no_grad():
            db = assert_sqnr(here(**put).logits.float().cpu(), there(**inputs).logits, 20.0, kind.__name__)
        options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 3, "eos_token_id": None}
        cache = {cache_argument(here): Float8Cache(here)}
        made = here.generate(**put, attention_mask=torch.ones_like(put["input_ids"]), **options, **cache)
        assert made.shape == (1, 15)
        assert_steps(here, put)
        experts = sum(isinstance(module, FrozenFloat8Experts) for module in here.modules())
        found.append(f"{type(here).__name__} {db:.1f} dB, {experts} layers of experts")
    return "; ".join(found)


@torch.no_grad()
def assert_steps(model: Any, inputs: dict[str, torch.Tensor]) -> None:
    """The last tokens one by one, with the cache's own kernels, against all of them at once."""
    ids, rest = inputs["input_ids"], {name: x for name, x in inputs.items() if name != "input_ids"}
    name, cache, begin = cache_argument(model), Float8Cache(model), ids.shape[1] - 3
    want = model(input_ids=ids, use_cache=True, **{name: Float8Cache(model)}, **rest).logits[0, begin:]
    model(input_ids=ids[:, :begin], use_cache=True, **{name: cache}, **rest)
    steps = [model(input_ids=part, use_cache=True, **{name: cache}).logits[0] for part in ids[:, begin:].split(1, 1)]
    assert_sqnr(torch.cat(steps).float(), want.float(), 16.0, f"steps of {type(model).__name__}")


def work(device: str) -> Callable[[], list[torch.Tensor]]:
    """Products of one, some and many tokens, and attention to an FP8 cache."""
    torch.manual_seed(0)
    q = octavo.quantize((torch.randn(1024, 512) / 22).to(device), Rule())
    x = [torch.randn(m, 512, dtype=torch.bfloat16).to(device) for m in (1, 40, 700)]
    cache, query = kv._made("token-head", 1, 2, 500, 128, device), kv._values(1, 8, 128, seed=1, device=device)
    return lambda: [*(linear(rows, q) for rows in x), attend(query, cache, 0.09, 500)]


def streams(folder: str) -> str:
    """Two streams at once: each the bits of one alone."""
    call = work(DEVICE)
    want = call()
    torch.cuda.synchronize()
    both = [torch.cuda.Stream() for _ in range(2)]
    found: list[list[torch.Tensor]] = []
    for _ in range(20):
        for stream in both:
            with torch.cuda.stream(stream):
                found.append(call())
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for some in found for a, b in zip(some, want, strict=True))
    return f"{len(found)} times the same bits"


def another_device(folder: str) -> str | None:
    """Tensors on a device that is not the current one; needs two."""
    if torch.cuda.device_count() < 2:
        return None
    want = [y.cpu() for y in work("cuda:0")()]
    with torch.cuda.device(0):
        found = [y.cpu() for y in work("cuda:1")()]
    assert all(torch.equal(y, z) for y, z in zip(found, want, strict=True))
    return "cuda:1 while cuda:0 is current"


def captured(folder: str) -> str:
    """A CUDA graph of products and attention: the bits of the calls."""
    call, kept = work(DEVICE), list[torch.Tensor]()
    want = call()
    graph = capture(lambda: kept.__setitem__(slice(None), call()), torch.device(DEVICE), warm=0)
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(kept, want, strict=True))
    return "equal"


def compiled(folder: str) -> str:
    """torch.compile without a break over every operation, sizes of M as they come, gradients too."""
    q = octavo.quantize(torch.randn(256, 512, device=DEVICE) / 22, Rule())
    row, ops = ("e4m3", *q.granularity.tile), torch.ops.octavo

    def function(x: torch.Tensor) -> torch.Tensor:
        y = linear(x, q) + linear(x, q, activation="token")
        codes, scale = ops.quantize(y.detach(), None, *row, "absmax", "fp32", "auto")
        rounded = ops.fake_quantize(y, None, *row, "absmax", "fp32", "auto")
        again = ops.dequantize(codes, scale, *row, torch.bfloat16, "auto")
        square = ops.scaled_mm(codes, scale, codes, scale, *row, *row, torch.bfloat16, "auto")
        return rounded.sum() + again.sum() + square.sum(-1, keepdim=True) + y

    torch._dynamo.reset()
    fast = torch.compile(function, fullgraph=True)
    for m in (1, 33, 300):
        x = torch.randn(m, 512, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
        found, want = fast(x).float(), function(x).float()
        assert_sqnr(found.detach(), want.detach(), 35.0, f"{m} tokens")
        mine, theirs = (torch.autograd.grad(y.square().mean(), x)[0] for y in (found, want))
        assert_sqnr(mine, theirs, 20.0, f"gradient of {m} tokens")
    return "linear, quantize, fake_quantize, dequantize, scaled_mm"


def compile_times(folder: str) -> str:
    """Seconds to load all kernels of decoding an 8B shape: nothing on disk, and from disk."""
    root = str(Path(__file__).parents[1])
    with tempfile.TemporaryDirectory() as place:
        environment = os.environ | {
            "OCTAVO_CACHE_DIR": place,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        }
        found = []
        for _ in range(2):
            command = [sys.executable, "-W", "ignore", "-c", COLD.format(root=root)]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=root)
            assert not done.returncode, done.stderr[-300:]
            found.append(done.stdout.split()[-2:])
    (count, cold), (_, warm) = found
    assert float(cold) < 5 and float(warm) < 0.2, f"{count} kernels, cold {cold} s, warm {warm} s"
    return f"{count} kernels, cold {float(cold):.2f} s, warm {float(warm):.3f} s"


CHECKS = (same_tokens, experts_and_towers, streams, another_device, captured, compiled, compile_times)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--only", nargs="*")
    args = parser.parse_args()
    print(f"torch {torch.__version__}, {caps_of(DEVICE)}", flush=True)
    wrong = 0
    with tempfile.TemporaryDirectory() as place:
        if args.model is None:
            LlamaForCausalLM(LlamaConfig(**TEXT)).to(torch.bfloat16).save_pretrained(place)
        for check in CHECKS:
            if args.only and check.__name__ not in args.only:
                continue
            begin = time.perf_counter()
            try:
                found = check(args.model or place)
                said = f"ok    {check.__name__}: {found}" if found else f"-     {check.__name__}: not measured"
            except Exception as error:
                wrong, said = 1, f"WRONG {check.__name__}: {type(error).__name__}: {str(error)[:600]}"
            print(f"{said} ({time.perf_counter() - begin:.1f} s)", flush=True)
    return wrong


if __name__ == "__main__":
    raise SystemExit(main())
