"""Gathering the second moments that error-compensated rounding needs: samples through a model, matrices to disk.

What is in memory at once is bounded: layers are taken in batches whose matrices fit, one pass over the samples each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch
from torch import nn

from octavo.base.errors import ConfigError, DataError
from octavo.base.log import Advance, progress
from octavo.formats.granularity import PerTensor
from octavo.formats.recipe import Recipe
from octavo.formats.scale import scale_of
from octavo.integrations import measuring
from octavo.integrations.blocks import WEIGHED, BlockMoments, BlockWalk, Groups, check_finite, head_backward
from octavo.integrations.data import calibration_samples
from octavo.integrations.hub import resolve_model
from octavo.integrations.loading import device_of
from octavo.modules.moments import Inputs, MomentObserver, MomentSums, TokenWeights, fast_arithmetic, input_groups
from octavo.ops.quantize import dequantize
from octavo.ops.rounding import Compensator
from octavo.store.manifest import fingerprint
from octavo.store.moments import Moments, MomentsWriter
from octavo.store.pieces import find_pieces
from octavo.store.tensors import Checkpoint

WEIGHTINGS = ("none", "fisher")
MEMORY = 4 << 30  # bytes of matrices at once
# With fewer tokens than this share of its inputs, rounding fits the tokens and not the layer: on random correlated
# inputs the error on others is 1.3 times that of nearest rounding at 1/16, 0.9 times at 1/8, 0.6 times at 1/4.
FEWEST = 0.25
AT_ONCE = 1024  # tokens of a pass forward and backward: larger ones are no faster, and need more memory
SEED = 0  # of the tokens drawn for the Fisher weights
Keep = Callable[[Groups, MomentSums], None]


@contextmanager
def moments_for(
    rounding: str,
    model: str | Path,
    *,
    moments: Moments | Path | str | None = None,
    data: str | None = None,
    samples: int = 128,
    context: int = 512,
    weighting: str = "fisher",
    device: str | None = None,
    scratch: Path | None = None,
) -> Iterator[Moments | None]:
    """What `rounding` needs to know about the inputs of a model: None for `nearest`.

    For `compensated` either `moments`, a folder, or `data` to gather them from now; those are kept in a temporary
    folder inside `scratch` (default: the system's) until the block ends. ConfigError for anything else.
    """
    given = [name for name, value in (("moments", moments), ("data", data)) if value is not None]
    if rounding == "nearest":
        if given:
            fix = "Use rounding 'compensated', or leave it out."
            raise ConfigError(f"{given[0]} with rounding 'nearest', which has no use for it", fix=fix)
        yield None
    elif len(given) != 1:
        got = "both moments and data" if given else "neither moments nor data"
        fix = "Give moments (of octavo calibrate --moments), or data to calibrate on."
        raise ConfigError("rounding 'compensated'", got=got, need="one of them", fix=fix)
    elif isinstance(moments, Moments):
        yield moments
    elif moments is not None:
        yield Moments.open(moments, model=resolve_model(model))
    else:
        with TemporaryDirectory(prefix=".octavo-moments.", dir=scratch) as folder:
            settings: dict[str, Any] = {"samples": samples, "context": context, "weighting": weighting}
            yield moments_of(model, str(data), Path(folder), device=device, durable=False, **settings)


def moments_of(
    model: str | Path,
    data: str | Path,
    out: Path,
    *,
    samples: int,
    context: int,
    weighting: str,
    device: str | None = None,
    dtype: str = "auto",
    durable: bool = True,
    every: int = WEIGHED,
) -> Moments:
    """Open a model in 16 bit in host memory and gather its moments, on a GPU block by block: see `gather_moments`."""
    place = device_of(device)
    opened = measuring.open_model(model, device="cpu", dtype=measuring.compute_dtype(dtype, device))
    texts, windows = calibration_samples(opened.tokenizer, data, samples, opened.context(context))
    opened.require_known(windows)
    blockwise = None if place.type == "cpu" else place  # in host memory the model is there as a whole anyway
    settings: dict[str, Any] = {"device": blockwise, "durable": durable, "every": every}
    return gather_moments(opened, texts.fingerprint, windows, out, weighting, **settings)


def gather_moments(
    opened: measuring.Opened,
    data_fingerprint: str,
    samples: list[torch.Tensor],
    out: Path,
    weighting: str,
    memory: int = MEMORY,
    sequential: Recipe | None = None,
    device: torch.device | None = None,
    durable: bool = True,
    every: int = WEIGHED,
) -> Moments:
    """Run samples, int64 [T] each, through a model in 16 bit and write the moments folder `out`.

    weighting: `none`, or `fisher`, which costs a backward pass over one sample of `every` and buys a third of the
    divergence; tokens of the other samples count as the mean.
    memory: bytes of matrices held at once. device: go block by block, each on this device while it works; None: where
    the model is, and as a whole if its matrices fit. sequential: block by block, and each block is given what the
    blocks before it make of the samples once they are rounded by this recipe, from their own moments. durable: see
    MomentsWriter.
    CheckpointError for a model whose activations hold NaN or Inf.
    """
    model, checkpoint = opened.model, Checkpoint.open(opened.folder)
    measuring.show_experts(model)
    groups = watched_groups(model)
    names = DiskNames(model, checkpoint)
    writer = MomentsWriter(out, durable=durable)

    def keep(batch: Groups, seen: MomentSums) -> None:
        members = {key: [part for name in batch[key] for part in names(name)] for key in batch}
        few = {key for key in batch if seen.tokens[key] < FEWEST * _width(model, batch[key][0])}
        for key in few:
            seen.matrices.pop(key, None)
        writer.add(seen.matrices, members)
        writer.skip({module: seen.tokens[key] for key in few for module in members[key]})

    batches = list(split_groups(model, groups, memory))
    at_once = weighting == "none" or len(batches) == 1  # else each batch would take a backward pass of its own
    if sequential is None and device is None and at_once:
        _whole_model(model, batches, samples, weighting, keep, every)
    else:
        walk = BlockWalk(model, samples, groups, device or next(model.parameters()).device)
        _block_by_block(walk, weighting, sequential, keep, every)
    writer.finish(
        model_fingerprint=fingerprint(checkpoint),
        data_fingerprint=data_fingerprint,
        tokens=sum(map(len, samples)),
        weighting=weighting,
    )
    return Moments.open(out)


def _whole_model(
    model: nn.Module, batches: list[Groups], samples: list[torch.Tensor], weighting: str, keep: Keep, every: int
) -> None:
    with progress("Second moments", len(batches) * len(samples)) as advance, fast_arithmetic(model):
        for batch in batches:
            if weighting == "fisher":
                keep(batch, fisher_moments(model, batch, samples, advance, every))
            else:
                keep(batch, observe(model, batch, samples, advance))


def _block_by_block(walk: BlockWalk, weighting: str, sequential: Recipe | None, keep: Keep, every: int) -> None:
    total = len(walk.blocks) * len(walk.samples)
    if weighting == "fisher" and sequential is None:
        with progress("Second moments", 2 * total) as advance:
            walk.fisher_moments(keep, advance, every)
        return
    round_in_place, weights = _rounding(walk, sequential) if sequential else None, None
    if weighting == "fisher":
        with progress("Fisher weights", 2 * total) as advance:
            weights = walk.token_weights(advance)

    def visit(batch: Groups, seen: MomentSums) -> None:
        keep(batch, seen)
        if round_in_place:
            round_in_place(batch, seen)

    with progress("Second moments", total) as advance:
        walk.moments(weights, visit, advance, sequential=sequential is not None)


def _rounding(walk: BlockWalk, recipe: Recipe) -> Keep:
    """What rounds the linears of a block in place. ConfigError for experts in stacks."""
    modules = dict(walk.model.named_modules())
    names = [name for groups in walk.groups.values() for members in groups.values() for name in members]
    if stacked := [name for name in names if name not in modules]:
        what = f"{stacked[0]} is an expert in a stack"
        raise ConfigError("sequential calibration", got=what, need="linears", fix="Calibrate without --sequential.")
    weights = {name: modules[name].get_parameter("weight") for name in names}
    decisions = recipe.assign({f"{name}.weight": tuple(weight.shape) for name, weight in weights.items()})

    def visit(batch: Groups, seen: MomentSums) -> None:
        known = BlockMoments(batch, seen.matrices)
        solve = Compensator(known)
        for members in batch.values():
            amax = torch.stack([weights[name].detach().abs().max().float() for name in members]).max()
            for name in members:
                rule = decisions[name].rule
                if rule is None:
                    continue
                shared = isinstance(rule.granularity, PerTensor)
                scale = scale_of(amax, rule.spec, rule.scale_format) if shared else None
                rule = rule if name in known else rule.rounded("nearest")
                weight = weights[name].data
                weight.copy_(dequantize(solve(weight, rule, scale, name)))

    return visit


def watched_groups(model: nn.Module) -> dict[str, list[str]]:
    """The linears that the default recipe quantizes, grouped by their common input.

    Expert E of a stacked parameter `owner.leaf` is a group of its own, `owner.E.leaf`: it sees the tokens routed to it.
    """
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    chosen = [name for name, decision in Recipe().assign(shapes).items() if decision.rule is not None]
    modules = dict(model.named_modules())
    linears = [name for name in chosen if isinstance(modules.get(name), nn.Linear)]
    if not linears:
        raise DataError("this model has no linear to calibrate", got=type(model).__name__)
    groups = input_groups(linears)
    for name in chosen:
        if len(shape := shapes.get(name, ())) == 3:
            owner, _, leaf = name.rpartition(".")
            groups |= {key: [key] for key in (f"{owner}.{expert}.{leaf}" for expert in range(shape[0]))}
    return groups


def split_groups(model: nn.Module, groups: Mapping[str, list[str]], memory: int) -> Iterator[Groups]:
    """Groups in order, in batches whose matrices together stay below `memory` bytes; a larger one comes alone."""
    batch: dict[str, list[str]] = {}
    used = 0
    for key, names in groups.items():
        size = 8 * _width(model, names[0]) ** 2  # two halves
        if batch and used + size > memory:
            yield batch
            batch, used = {}, 0
        batch[key] = names
        used += size
    yield batch


def fisher_moments(
    model: nn.Module,
    groups: Mapping[str, list[str]],
    samples: list[torch.Tensor],
    advance: Advance,
    every: int = WEIGHED,
) -> MomentSums:
    """Second moments of one batch of groups, weighted: one forward and backward pass for AT_ONCE tokens of one
    sample of `every`. Tokens of the others count as their group's mean.

    Where experts would mix their tokens, one sample at a time. No parameter gets a gradient. CheckpointError if an
    input or a gradient held NaN or Inf.
    """
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    generator = torch.Generator().manual_seed(SEED)
    wake = cast(Any, model).get_input_embeddings().register_forward_hook(_require_grad)
    sums = MomentSums(groups)
    try:
        with torch.enable_grad(), TokenWeights(model, groups, sums.add) as weights:
            for together in _stacked(samples[::every], 1 if weights.stacks else AT_ONCE):
                head_backward(model, together, generator)
                weights.flush()
                advance(len(together))
    finally:
        wake.remove()
    with Inputs(model, groups, lambda key, x: sums.add(key, x, weights.mean(key))):
        for i, sample in enumerate(samples):
            if i % every:
                measuring.run_layers(model, sample)
                advance(1)
    sums.finish()
    check_finite(sums)
    return sums


def _stacked(samples: list[torch.Tensor], tokens: int) -> Iterator[torch.Tensor]:
    """Samples in order, int64 [B, T]: those of one length together while they have so many tokens at most."""
    for length, same in groupby(samples, key=len):
        rest = list(same)
        step = max(tokens // length, 1)
        yield from (torch.stack(rest[i : i + step]) for i in range(0, len(rest), step))


def observe(
    model: nn.Module, groups: Mapping[str, list[str]], samples: list[torch.Tensor], advance: Advance
) -> MomentSums:
    """Second moments of one batch of groups, every token alike. CheckpointError if an input held NaN or Inf."""
    with MomentObserver(model, groups) as seen:
        for sample in samples:
            measuring.run_layers(model, sample)
            advance(1)
    check_finite(seen)
    return seen


def _require_grad(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    """Gradients need a place to start from where no parameter has one."""
    return output.requires_grad_(True)


def _width(model: nn.Module, name: str) -> int:
    """Inputs K of a linear, or of expert E of a stack that is named `owner.E.leaf`."""
    owner, _expert, leaf = [*name.rsplit(".", 2), "", ""][:3]
    experts = model.get_submodule(owner)
    stack = experts._parameters.get(leaf)
    if stack is None:
        return cast(nn.Linear, model.get_submodule(name)).in_features
    return int(stack.shape[1 if getattr(experts, "is_transposed", False) else 2])


class DiskNames:
    """names(module in the model) -> what a checkpoint, or a conversion of it, calls what it consists of.

    Experts keep their name in the model too: `octavo.load` looks them up by it.
    """

    def __init__(self, model: nn.Module, checkpoint: Checkpoint) -> None:
        self._stored = measuring.stored_names(model, checkpoint)
        self._modules = {name for name, _ in model.named_modules()}
        self._checkpoint = checkpoint

    def __call__(self, name: str) -> list[str]:
        if name in self._modules:
            parts = self._stored(f"{name}.weight")
            return [parts[0][0] if len(parts) == 1 and len(parts[0]) == 1 else name]
        owner, expert, leaf = name.rsplit(".", 2)
        parts = self._stored(f"{owner}.{leaf}")
        if len(parts) == 1 and len(parts[0]) == 1:  # one stack on disk as well
            return [name, *self._unstacked.get((parts[0][0], int(expert)), [])]
        return [name, *(part[int(expert)] for part in parts)]

    @cached_property
    def _unstacked(self) -> dict[tuple[str, int], list[str]]:
        found: dict[tuple[str, int], list[str]] = {}
        for piece in find_pieces(self._checkpoint, dequantize=True):
            if piece.expert is not None and piece.name.endswith(".weight"):
                found.setdefault((piece.source, piece.expert), []).append(piece.module)
        return found
