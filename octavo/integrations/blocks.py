"""A model block by block: all samples through one block before the next one, each on the device only while it works.

What the device holds at once is one block with its moments, whatever the model's depth; the rest waits in host memory.
The gradients that Fisher weights need go the same way back: the inputs of blocks are kept, and each block runs again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import Any, cast

import torch
from torch import nn

from octavo.base.errors import CheckpointError, DataError
from octavo.base.log import Advance
from octavo.integrations.layers import decoder
from octavo.modules.moments import Inputs, MomentObserver, MomentSums, TokenWeights, fast_products, fisher_backward

Groups = Mapping[str, list[str]]
Hidden = list[torch.Tensor]  # [1, T, hidden] of each sample, in host memory
Forward = Callable[..., Any]
SEED = 0  # of the tokens drawn for the Fisher weights
HEAD_TOKENS = 128
# For one conversion one sample of so many is weighed, by a backward pass; tokens of the others count as the mean.
WEIGHED = 4


class BlockWalk:
    """model: in evaluation mode, in host memory or on `device`, where it works. samples: int64 [T] each.

    groups: linears by common input, as in octavo.modules.moments, all of them inside blocks (DataError otherwise).
    """

    def __init__(self, model: nn.Module, samples: list[torch.Tensor], groups: Groups, device: torch.device) -> None:
        self.model, self.samples, self.device = model, samples, device
        self.blocks = blocks_of(model)
        self.groups: dict[str, dict[str, list[str]]] = {name: {} for name in self.blocks}
        for key, names in groups.items():
            owner = next((name for name in self.blocks if key.startswith(f"{name}.")), None)
            if owner is None:
                raise DataError(f"{key} is in no block of the model's stack", need="every linear in a block")
            self.groups[owner][key] = names
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        self._calls: dict[str, list[tuple[tuple[Any, ...], dict[str, Any]]]] = {name: [] for name in self.blocks}
        self._first: Hidden = []
        self._tuple = False  # whether blocks return their result in one
        self._capture()

    def token_weights(self, advance: Advance) -> dict[str, torch.Tensor]:
        """Fisher weights, group -> float32 [tokens], of the tokens that reached it.

        advance: called with samples, out of 2 x blocks x samples.
        """
        found: dict[str, list[torch.Tensor]] = {}
        for _ in self._backward(lambda key, x, weights: found.setdefault(key, []).append(weights), advance):
            pass
        return {key: torch.cat(weights) for key, weights in found.items()}

    def fisher_moments(
        self, visit: Callable[[Groups, MomentSums], object], advance: Advance, every: int = WEIGHED
    ) -> None:
        """Blocks from last to first: `visit(groups, seen)` is given the moments of each, weighted. These and the
        weights of the block are on the device, so that it can round there.

        every: one sample of so many is weighed, tokens of the others count as the mean of their group.
        advance: called with samples, out of 2 x blocks x samples.
        """
        sums = MomentSums(key for groups in self.groups.values() for key in groups)
        for groups in self._backward(sums.add, advance, every):
            sums.finish()
            check_finite(sums)
            visit(groups, sums)
            sums.matrices.clear()

    def _backward(
        self, use: Callable[[str, torch.Tensor, Any], object], advance: Advance, every: int = 1
    ) -> Iterator[dict[str, list[str]]]:
        """Forward through all blocks, and back from the last to the first: yields the groups of each after its turn,
        while it is still on the device.

        use: see TokenWeights; the samples that are not weighed come with one number, the mean of the weights.
        """
        entered: dict[str, Hidden] = {}
        hidden = self._first
        with torch.no_grad(), fast_products():
            for name, block in self.blocks.items():
                entered[name] = hidden
                with resident(block, self.device):
                    hidden = self._through(name, hidden)
                advance(len(self.samples))
        gradients = self._head_gradients(hidden, every)
        for name, block in reversed(self.blocks.items()):
            inputs, groups = entered.pop(name), self.groups[name]
            watched = TokenWeights(self.model, groups, use)
            with resident(block, self.device):
                with torch.enable_grad(), fast_products(), watched:
                    for i in gradients:
                        leaf = inputs[i].to(self.device).requires_grad_(True)
                        out = self._run(name, i, leaf)
                        out.backward(gradients[i].to(self.device))  # type: ignore[no-untyped-call]
                        gradients[i] = cast(torch.Tensor, leaf.grad).cpu()
                        watched.flush()
                with torch.no_grad(), fast_products(), Inputs(self.model, groups, partial(_as_the_mean, watched, use)):
                    for i in (i for i in range(len(inputs)) if i not in gradients):
                        self._run(name, i, inputs[i].to(self.device))
                advance(len(self.samples))
                yield groups

    @torch.no_grad()
    def moments(
        self,
        weights: Mapping[str, torch.Tensor] | None,
        visit: Callable[[Groups, MomentSums], object],
        advance: Advance,
        *,
        sequential: bool = False,
    ) -> None:
        """Blocks from first to last: `visit(groups, seen)` is given the moments of each, on the device.

        sequential: what `visit` does to the weights in place, a copy, is what the next blocks' inputs come from.
        weights: as `token_weights` returns them. advance: called with samples, out of blocks x samples.
        """
        hidden = self._first
        for name, block in self.blocks.items():
            with resident(block, self.device, copy=sequential):
                with fast_products(), MomentObserver(self.model, self.groups[name], weights) as seen:
                    after = self._through(name, hidden)
                check_finite(seen)
                visit(self.groups[name], seen)
                with fast_products():
                    hidden = self._through(name, hidden) if sequential else after
            advance(len(self.samples))

    def _capture(self) -> None:
        """What each block is called with beside its input, and what the first one is given; no block runs, but once."""

        def forward(name: str, original: Forward, *arguments: Any, **keywords: Any) -> Any:
            first, hidden = name == next(iter(self.blocks)), _hidden(arguments, keywords)
            if first and not self._first:
                with resident(self.blocks[name], self.device):
                    self._tuple = isinstance(original(*arguments, **keywords), tuple)
            if first:
                self._first.append(hidden.cpu())
            rest = {key: value for key, value in keywords.items() if key != "hidden_states"}
            self._calls[name].append((arguments[1:], rest))
            return self._result(hidden)

        with torch.no_grad(), self._instead(forward):
            for sample in self.samples:
                decoder(self.model)(input_ids=sample[None].to(self.device), use_cache=False)

    def _head_gradients(self, hidden: Hidden, every: int) -> dict[int, torch.Tensor]:
        """hidden: after the last block -> of one sample of `every`, gradients there of a drawn token's negative
        log-likelihood."""
        generator = torch.Generator().manual_seed(SEED)
        gradients = {}
        leaf = torch.empty(0)

        def forward(name: str, original: Forward, *arguments: Any, **keywords: Any) -> Any:
            return self._result(leaf)

        with torch.enable_grad(), fast_products(), self._instead(forward):
            for i in range(0, len(hidden), every):
                leaf = hidden[i].to(self.device).requires_grad_(True)
                head_backward(self.model, self.samples[i][None], generator)
                gradients[i] = cast(torch.Tensor, leaf.grad).cpu()
        return gradients

    def _through(self, name: str, hidden: Hidden) -> Hidden:
        return [self._run(name, i, x.to(self.device)).cpu() for i, x in enumerate(hidden)]

    def _run(self, name: str, sample: int, hidden: torch.Tensor) -> torch.Tensor:
        arguments, keywords = self._calls[name][sample]
        result = self.blocks[name](hidden, *arguments, **keywords)
        return cast(torch.Tensor, result[0] if self._tuple else result)

    def _result(self, hidden: torch.Tensor) -> Any:
        return (hidden,) if self._tuple else hidden

    @contextmanager
    def _instead(self, forward: Forward) -> Iterator[None]:
        """Inside, the model without its blocks is on the device, and forward(name, original, ...) runs for a block."""
        inside = {id(t) for block in self.blocks.values() for t in (*block.parameters(), *block.buffers())}
        originals = {name: block.forward for name, block in self.blocks.items()}

        def bound(name: str) -> Forward:
            return lambda *arguments, **keywords: forward(name, originals[name], *arguments, **keywords)

        with resident(self.model, self.device, but=inside):
            try:
                for name, block in self.blocks.items():
                    block.forward = bound(name)
                yield
            finally:
                for block in self.blocks.values():
                    del block.forward  # the class's own again


class BlockMoments:
    """The moments of one block, as octavo.ops.rounding.Compensator asks for them."""

    def __init__(self, groups: Groups, matrices: Mapping[str, torch.Tensor]) -> None:
        self._keys = {name: key for key, names in groups.items() for name in names if key in matrices}
        self._matrices = matrices

    def __contains__(self, module: object) -> bool:
        return module in self._keys

    def key(self, module: str) -> str:
        return self._keys[module]

    def get(self, module: str) -> torch.Tensor:
        return self._matrices[self._keys[module]]


def head_backward(model: nn.Module, samples: torch.Tensor, generator: torch.Generator) -> None:
    """Forward and backward of the negative log-likelihood of drawn tokens; samples int64 [B, T].

    The head runs on HEAD_TOKENS at a time: with the logits of whole samples it would take more memory than the rest.
    """
    inner = decoder(model)
    tokens = samples.to(next(model.parameters()).device)
    out = inner(input_ids=tokens, use_cache=False)
    hidden = out.last_hidden_state.detach()
    gradient = torch.empty_like(hidden)
    try:
        for row, start in product(range(len(samples)), range(0, samples.shape[1], HEAD_TOKENS)):
            part = slice(start, start + HEAD_TOKENS)
            leaf = hidden[row, part][None].requires_grad_(True)
            given = type(out)(last_hidden_state=leaf)
            inner.forward = lambda *_, given=given, **__: given
            logits = cast(Any, model)(input_ids=tokens[row : row + 1, part], use_cache=False).logits[0]
            fisher_backward(logits, generator)
            gradient[row, part] = leaf.grad[0]
    finally:
        del inner.forward  # the class's own again
    out.last_hidden_state.backward(gradient)


def blocks_of(model: nn.Module) -> dict[str, nn.Module]:
    """The stack of blocks of a causal language model, by name in order. DataError for a model without one."""
    inner = decoder(model)
    stacks = [child for child in inner.children() if isinstance(child, nn.ModuleList) and len(child)]
    if not stacks:
        raise DataError(f"{type(model).__name__} has no stack of blocks", need="a list of decoder layers")
    stack = max(stacks, key=lambda child: sum(p.numel() for p in child.parameters()))
    prefix = next(name for name, module in model.named_modules() if module is stack)
    return {f"{prefix}.{i}": block for i, block in enumerate(stack)}


@contextmanager
def resident(
    module: nn.Module, device: torch.device, *, copy: bool = False, but: set[int] | None = None
) -> Iterator[None]:
    """Parameters and buffers on `device` inside, and what they were before afterwards, whatever became of the copies.

    copy: even where they are there already. but: ids of tensors to leave alone.
    """
    tensors = [t for t in (*module.parameters(), *module.buffers()) if id(t) not in (but or ())]
    before = [t.data for t in tensors]
    for t in tensors:
        t.data = t.data.to(device, copy=copy)
    try:
        yield
    finally:
        for t, data in zip(tensors, before, strict=True):
            t.data = data


def _as_the_mean(
    weights: TokenWeights, use: Callable[[str, torch.Tensor, Any], object], key: str, x: torch.Tensor
) -> None:
    use(key, x, weights.mean(key))


def _hidden(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> torch.Tensor:
    return cast(torch.Tensor, arguments[0] if arguments else keywords["hidden_states"])


def check_finite(seen: MomentSums) -> None:
    """CheckpointError if an input held NaN or Inf."""
    for key, matrix in seen.matrices.items():
        if not bool(torch.isfinite(matrix.diagonal()).all()):
            raise CheckpointError(f"the input of {key} holds NaN or Inf", fix="Check the weights, or use float32.")
