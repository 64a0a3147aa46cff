"""Do kernels add to what FP8 costs? A real model by every kernel, against the same codes in the reference backend.

    python benchmarks/kernel_quality.py [--model demo] [--tokens 12288] [--only weights inputs cache] [--out FILE]

KL (nats per token) and perplexity against the 16-bit weights in float32, windows of 512 tokens of the demo's evaluation
text; everything in FP8 computes in BF16, as on a GPU it does. A line a variant, then JSON; exit code 1 where the KL of
a kernel is more than 1 % beyond the reference's on the same tokens. `paired`: the difference of the two KLs window by
window, with its standard error; two orders of sums in BF16 already differ by about that. Decoding reads the text token
by token through captured steps, so that products have few tokens and attention reads the cache.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from octavo.base.hardware import caps_of
from octavo.integrations.data import load_texts, token_windows
from octavo.integrations.decoding import Decoder
from octavo.integrations.hub import load_tokenizer, resolve_model
from octavo.integrations.kv_cache import cached_logits
from octavo.integrations.measuring import load_base, logits
from octavo.integrations.transformers import load
from octavo.kernels.plans import Tokens
from octavo.modules.divergence import Estimate, PairedScore
from octavo.modules.frozen import FrozenFloat8Linear, FrozenParameter
from octavo.modules.kv_cache import Float8KVWriter
from octavo.ops import backends, w8a16
from octavo.workflows.bench import machine

LIMIT = 0.01
CONTEXT = 512
ROWS = 8  # of the batch that decodes
WAYS = {  # of backend w8a16: tokens at a time, and what takes them
    "w8a16, up to 16 tokens": (16, Tokens(ring=16)),
    "w8a16, tiles": (64, Tokens(ring=0, tile=128)),
    "w8a16, two terms, ours": (128, Tokens(ring=0, term_blocks=128)),
    "w8a16, two terms": (CONTEXT, Tokens(ring=0, terms=CONTEXT)),
    "w8a16, decoded weights": (CONTEXT, Tokens(ring=0, tile=0)),
}
Logits = Callable[[nn.Module, torch.Tensor], torch.Tensor]


@contextmanager
def backend(name: str, tokens: int = CONTEXT, ways: Tokens | None = None) -> Iterator[None]:
    """Products by this backend (`auto`: the choice), w8a16's so many tokens at a time in one of its ways."""
    table, on, product = backends.load_table, w8a16.tokens_on, w8a16.linear
    if name != "auto":
        rows = [{"op": "*", "device": "*", "order": [name]}]
        backends.load_table = lambda: table() | {"rows": rows}
    if ways is not None:
        w8a16.tokens_on = lambda sm: ways
        w8a16.linear = lambda x, *rest: torch.cat([product(part, *rest) for part in x.split(tokens)])
    _forget()
    try:
        yield
    finally:
        backends.load_table, w8a16.tokens_on, w8a16.linear = table, on, product
        _forget()


def _forget() -> None:
    backends.kernels.cache_clear()
    w8a16._plan.cache_clear()


class Lab:
    """Windows of text, and the logits of the 16-bit weights for them."""

    def __init__(self, folder: Path, tokens: int, device: str) -> None:
        self.folder, self.device = folder, device
        tokenizer = load_tokenizer(folder)
        windows = token_windows(tokenizer, load_texts("demo", "eval"), CONTEXT, tokens // CONTEXT)
        self.windows = windows.to(device)
        base = load_base(folder, None, device=device, dtype=torch.float32).eval()
        self.base = [
            logits(base, window).to(torch.bfloat16 if device == "cpu" else torch.float32) for window in self.windows
        ]

    def open(self, recipe: str) -> nn.Module:
        return load(self.folder, recipe, activation="none", dtype=torch.bfloat16, device=self.device).eval()

    def score(self, found: Iterator[torch.Tensor]) -> PairedScore:
        score = PairedScore()
        for base, window, ours in zip(self.base, self.windows, found, strict=True):
            score.add(base, ours, window)
        return score

    def by_windows(self, model: nn.Module, run: Logits = logits) -> PairedScore:
        return self.score(run(model, window) for window in self.windows)

    @torch.no_grad()
    def by_steps(self, model: nn.Module, kv_cache: Any) -> PairedScore:
        return self.score(found for rows in self.windows.split(ROWS) for found in _steps(model, rows, kv_cache))


def _steps(model: nn.Module, rows: torch.Tensor, kv_cache: Any) -> torch.Tensor:
    """tokens [B, T] -> logits [B, T, V], each of a step that saw those before it."""
    state: Any = Decoder(model, capacity=rows.shape[1], kv_cache=kv_cache).warmup(len(rows)).state
    state.length.zero_()
    for storage in state.storages:
        storage.reset()
    found = []
    for tokens in rows.mT:
        state.tokens.copy_(tokens)
        state.advance()
        found.append(state.logits.clone())
    return torch.stack(found, dim=1)


def set_activation(model: nn.Module, activation: str, windows: torch.Tensor) -> None:
    """activation of every FP8 linear; `static`: scales by the largest magnitudes that these windows bring."""
    linears = [m for m in model.modules() if isinstance(m, FrozenFloat8Linear)]
    largest: dict[nn.Module, torch.Tensor] = {}

    def see(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        largest[module] = torch.maximum(largest.get(module, args[0].new_zeros(())), args[0].detach().abs().amax())

    if activation == "static":
        hooks = [m.register_forward_pre_hook(see) for m in linears]
        for window in windows:
            logits(model, window)
        for hook in hooks:
            hook.remove()
    for m in linears:
        m.activation = activation
        m.input_scale = FrozenParameter(largest[m].float().reshape(1) / 448) if activation == "static" else None


def weights(lab: Lab, model: nn.Module) -> Iterator[tuple[str, str, PairedScore]]:
    what = "channel"
    with backend("reference"):
        yield "reference", what, lab.by_windows(model)
    for name, (tokens, ways) in WAYS.items():
        with backend("auto", tokens, ways):
            yield name, what, lab.by_windows(model)


def inputs(lab: Lab, model: nn.Module) -> Iterator[tuple[str, str, PairedScore]]:
    for activation in ("static", "token"):
        set_activation(model, activation, lab.windows[:2])
        for name, kind in (("reference", "reference"), ("native", "auto")):
            with backend(kind):
                yield name, f"channel, activation {activation}", lab.by_windows(model)
    set_activation(model, "none", lab.windows)


def cache(lab: Lab, model: nn.Module) -> Iterator[tuple[str, str, PairedScore]]:
    for kv_cache in ("16bit", "token-head", "tensor"):
        what = f"channel, KV cache {kv_cache}"
        with backend("reference"):
            writer = None if kv_cache == "16bit" else Float8KVWriter(kv_cache)
            run = logits if writer is None else partial(_written, writer=writer)
            yield "reference", what, lab.by_windows(model, run)
        with backend("auto"):
            yield "steps of the decoder", what, lab.by_steps(model, kv_cache)


# Name -> (reference or kernel, what, score); what a kernel is compared with comes before it.
PARTS = {"weights": weights, "inputs": inputs, "cache": cache}


def _written(model: nn.Module, window: torch.Tensor, writer: Float8KVWriter) -> torch.Tensor:
    return cached_logits(model, window, writer, queries=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--only", nargs="*", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--tokens", type=int, default=12_288)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    lab, rows = Lab(resolve_model(args.model), args.tokens, args.device), []
    reference, windows = 0.0, list[float]()
    model = lab.open("channel")
    for name, what, score in (row for part in args.only for row in PARTS[part](lab, model)):
        found = score.result()
        by_window = [float(kl.mean()) for kl in score.kl]
        if name == "reference":
            reference, windows = found.kl.mean, by_window
        paired = Estimate.of([mine - theirs for mine, theirs in zip(by_window, windows, strict=True)])
        row = {"what": what, "by": name, "kl": found.kl.mean, "se": found.kl.se, "rise_percent": found.rise.mean}
        row |= {"beyond": found.kl.mean / reference - 1, "paired": paired.mean, "paired_se": paired.se}
        rows.append(row)
        print(
            f"{what:30} {name:24} KL {found.kl.mean:.5f} +- {found.kl.se:.5f} ({100 * row['beyond']:+.2f} %, "
            f"paired {paired.mean:+.5f} +- {paired.se:.5f}), "
            f"perplexity {found.candidate.value:.4f} ({found.rise.mean:+.3f} %)",
            flush=True,
        )
    report = {"machine": machine(str(caps_of(args.device))), "tokens": args.tokens, "rows": rows}
    if args.out:
        args.out.write_text(json.dumps(report) + "\n")
    print(json.dumps(report))
    return int(any(row["beyond"] > LIMIT for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
