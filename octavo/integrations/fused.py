"""Decoder layers of Transformers on the fused FP8 path: norm + QKV, O, norm + MLP, with PEFT's LoRA or without.

Modules, names and state_dict stay what they are; only `forward` is bound, before a step of training (`drop_in`), and
each call asks again whether it can be fused: on a CPU, under torch.compile, with adapters merged or mixed,
the layers run one by one as before.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from types import MethodType
from typing import Any, cast

import torch
from peft.tuners.lora import Linear as LoraLinear
from torch import nn
from torch.distributed.tensor import DTensor

from octavo.base.errors import UnsupportedError
from octavo.base.hardware import caps_of
from octavo.formats.granularity import PerBlock, PerRow, PerTensor
from octavo.integrations.attention import take_unpacked_heads
from octavo.integrations.layers import Layout, layers_of
from octavo.integrations.seen import Seen
from octavo.modules.frozen import FrozenFloat8Linear
from octavo.ops.backends import BACKENDS, Problem
from octavo.ops.dropout import exact_rate
from octavo.ops.fused import codes_suffice
from octavo.ops.lora import Norm, Projection, gated_mlp, project

MULTIPLIED = {"token": (PerRow(), PerTensor()), "group128": (PerBlock(128, 128),)}  # weights by how inputs are rounded
FUSED = "_octavo_fused"
SCALE = "_octavo_scale"


def fuse(decoder: nn.Module) -> int:
    """Bind the fused forward to the layers of a decoder that are not bound to the modules they have.

    Returns how many got it; 0 for an architecture that is not in FUSED_DECODERS. Sparse MLPs run as they are.
    """
    layout, count = Layout.of(decoder), 0
    for layer in layers_of(decoder) if layout else ():
        binding: _Binding | None = layer.__dict__.get(FUSED)
        if layout and (binding is None or not binding.holds()):
            count += bool(_Binding(layer, layout).groups)
    if count:
        take_unpacked_heads(next(decoder.parameters()).device)
    return count


class _Binding:
    """What is bound in one decoder layer: undone where its modules are no longer those it was bound to.

    PEFT exchanges modules as adapters come and go, and who skips a norm must know who does its work.
    """

    def __init__(self, layer: nn.Module, layout: Layout) -> None:
        self.layer, self.holding = layer, True
        self.forwards: list[_Forward] = []
        self.groups: list[_Group | _Mlp] = []
        self.modules: list[tuple[nn.Module, str, nn.Module]] = []
        for parent in (layer, cast(Any, layer).self_attn, getattr(layer, "mlp", None)):
            self.modules += [(parent, name, module) for name, module in parent.named_children()] if parent else []
        layer.__dict__[FUSED] = self
        offset, layers = layout.written.norm_offset, layout.groups(layer)
        self.groups += [_Group(self, norm, group, offset) for norm, group in layers[:2]]
        for norm, group in layers[2:]:
            mlp = _Mlp(self, cast(nn.Module, norm), cast(Any, layer).mlp, group, cast(str, layout.activation), offset)
            self.groups.append(mlp)
            if layout.written.plain and "forward" not in layer.__dict__:  # what accelerate wraps moves inputs about
                _PlainLayer(self, cast(_Group, self.groups[0]), mlp)

    def holds(self) -> bool:
        """Whether all modules are still those that were bound; undoes what is bound where they are not."""
        if self.holding and all(parent._modules.get(name) is module for parent, name, module in self.modules):
            return True
        for forward in reversed(self.forwards):
            forward.undo()
        self.forwards.clear()
        self.holding = False  # even if they become so again
        return False


class _Forward:
    """`forward` of a module of a bound layer: `run`, and `plain`, which it was before."""

    def __init__(self, binding: _Binding, module: nn.Module, run: Callable[..., torch.Tensor]) -> None:
        self.binding, self.module, self.run = binding, module, run
        self.before = module.__dict__.get("forward")
        module.forward = self
        binding.forwards.append(self)

    def __call__(self, *args: Any, **options: Any) -> torch.Tensor:
        return self.run(*args, **options)

    def plain(self, *args: Any, **options: Any) -> torch.Tensor:
        if self.before is not None:
            return cast(torch.Tensor, self.before(*args, **options))
        return cast(torch.Tensor, type(self.module).forward(self.module, *args, **options))

    def undo(self) -> None:
        """For whoever wrapped this forward as well."""
        self.run = self.plain
        if self.module.__dict__.get("forward") is self:
            del self.module.forward
            if self.before is not None:
                self.module.forward = self.before

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self.binding.layer) not in memo:  # a copy of one module, as PEFT makes to train it, stands alone
            module = copy.deepcopy(self.module, memo)
            return MethodType(type(module).forward, module)
        new = object.__new__(_Forward)
        memo[id(self)] = new
        new.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return new


class _Group:
    """Projections of one input. The first is called first and computes all; the others hand out what it left.

    norm: where it is fused it passes its input on, since the projections do its work. Without one the input is the
    output of attention, which keeps it.
    """

    def __init__(
        self, binding: _Binding, norm: nn.Module | None, layers: Sequence[nn.Module], norm_offset: float = 0.0
    ) -> None:
        self.norm, self.norm_offset, self.layers = norm, norm_offset, list(layers)
        self.seen = Seen()
        self.outputs: dict[int, torch.Tensor] = {}
        self.pass_on = False
        self.passed_on: torch.Tensor | None = None
        if norm is not None:
            self.skipped = _SkippedNorm(binding, norm, self.layers)
        self.members = [_Forward(binding, layer, partial(self.call, index)) for index, layer in enumerate(layers)]

    def call(self, index: int, x: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        if not (index and self.seen.is_(x) and index in self.outputs):
            found = None if args or options else self._projections(x)
            if found is None:
                return self.members[index].plain(self.skipped.applied(x) if self.norm else x, *args, **options)
            self.seen.set(x)
            norm = norm_of(self.norm, self.norm_offset)
            outputs = project(x, found, norm, x_stays=norm is None, pass_on=self.pass_on)
            self.outputs = dict(enumerate(outputs[: len(found)]))
            self.passed_on = outputs[-1] if self.pass_on else None
        return self.outputs.pop(index)

    def _projections(self, x: torch.Tensor) -> list[Projection] | None:
        return projections_of(self.layers, x) if self.norm is None else self.skipped.projections(x)


class _Mlp:
    """norm, gate and up, activation, down."""

    def __init__(
        self,
        binding: _Binding,
        norm: nn.Module,
        mlp: nn.Module,
        layers: Sequence[nn.Module],
        activation: str,
        norm_offset: float,
    ) -> None:
        self.norm, self.norm_offset, self.activation, self.layers = norm, norm_offset, activation, list(layers)
        self.skipped = _SkippedNorm(binding, norm, self.layers)
        self.residual = False
        self.added: tuple[torch.Tensor, torch.Tensor] | None = None  # the next x, and what to add to it
        self.plain = _Forward(binding, mlp, self.forward).plain

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.added is not None and self.added[0] is x and self.skipped.found is not None:
            (_, delta), (gate, up, down), self.added = self.added, self.skipped.found, None
            norm = norm_of(self.norm, self.norm_offset)
            return gated_mlp(x, gate, up, down, self.activation, norm, residual=True, delta=delta)
        found = self.skipped.projections(x)
        if found is None:
            return self.plain(self.skipped.applied(x))
        gate, up, down = found
        norm, residual, self.residual = norm_of(self.norm, self.norm_offset), self.residual, False
        return gated_mlp(x, gate, up, down, self.activation, norm, residual=residual)


class _PlainLayer:
    """A decoder layer of two residuals in training: their gradients are added inside of the blocks' own, the same bits.

    Otherwise, and where a block is not fused, the layer runs as Transformers wrote it. checkpoints: Transformers does
    that in this method, not in `__call__` as its earlier versions do.
    """

    def __init__(self, binding: _Binding, attention: _Group, mlp: _Mlp) -> None:
        self.layer, self.attention, self.mlp = binding.layer, attention, mlp
        self.plain = _Forward(binding, self.layer, self).plain
        self.checkpoints = type(self.layer).__call__ is nn.Module.__call__

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        layer: Any = self.layer
        training = layer.training and torch.is_grad_enabled()
        if args or not training or _hooked(layer.mlp) or _hooked(layer.self_attn):  # they see a block's own result
            return self.plain(hidden_states, *args, **options)
        if not self.checkpoints or not getattr(layer, "gradient_checkpointing", False):
            return self._run(hidden_states, **options)
        if options.get("past_key_values") is not None or options.get("use_cache"):  # Transformers warns and drops them
            return self.plain(hidden_states, **options)
        return cast(torch.Tensor, layer._gradient_checkpointing_func(partial(self._run, **options), hidden_states))

    def _run(self, hidden_states: torch.Tensor, **options: Any) -> torch.Tensor:
        layer: Any = self.layer
        self.attention.pass_on, self.attention.passed_on = True, None
        try:
            attended = layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **options)[0]
            x = self.attention.passed_on
        finally:
            self.attention.pass_on, self.attention.passed_on = False, None
        x = hidden_states if x is None else x
        if (y := self._together(x, attended)) is not None:
            return y
        x = x + attended
        normed = layer.post_attention_layernorm(x)
        self.mlp.residual = normed is x  # passed on: the block will take it
        try:
            y = layer.mlp(normed)
            added = normed is x and not self.mlp.residual
        finally:
            self.mlp.residual = False
        return cast(torch.Tensor, y if added else x + y)

    def _together(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor | None:
        """x + attended and the MLP of it, added where the norm is applied; None where that is not fused."""
        if not self.mlp.skipped.skips(x):
            return None
        self.mlp.added = x, attended
        try:
            y: torch.Tensor = cast(Any, self.layer).mlp(x)
            return y if self.mlp.added is None else None
        finally:
            self.mlp.added = self.mlp.skipped.found = None


class _SkippedNorm:
    """A norm that passes x on where the layers behind it do its work, and makes up for it where they then do not."""

    def __init__(self, binding: _Binding, norm: nn.Module, layers: Sequence[nn.Module]) -> None:
        self.binding, self.norm, self.layers, self.passed = binding, norm, layers, Seen()
        self.found: list[Projection] | None = None
        self.plain = _Forward(binding, norm, self.forward).plain

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.binding.holds():
            return cast(torch.Tensor, self.norm.forward(x))
        self.found = projections_of(self.layers, x, self.norm)
        if self.found is None:
            return self.plain(x)
        self.passed.set(x)
        return x

    def skips(self, x: torch.Tensor) -> bool:
        """Whether `forward` would pass x on: for whoever calls the block behind the norm without it."""
        self.found = projections_of(self.layers, x, self.norm) if self.binding.holds() else None
        return self.found is not None

    def projections(self, x: torch.Tensor) -> list[Projection] | None:
        """`projections_of` the layers, which costs as much as launches do: what the norm has found for x, once."""
        found, self.found = self.found, None
        if not self.passed.lives():  # nobody came through the norm: x is what a projection was called with
            return None
        return found if found and self.passed.is_(x) else projections_of(self.layers, x, self.norm)

    def applied(self, x: torch.Tensor) -> torch.Tensor:
        return self.plain(x) if self.passed.is_(x) else x


def norm_of(norm: nn.Module | None, offset: float = 0.0) -> Norm | None:
    """The RMSNorm that multiplies by offset + weight."""
    if norm is None:
        return None
    weight = cast(torch.Tensor, norm.weight)
    epsilon = getattr(norm, "variance_epsilon", None) or norm.eps
    version = 0 if weight.is_inference() else weight._version  # made in inference mode, none counts its changes
    state = version, weight.dtype, weight.device
    seen, then, scale, suffice = norm.__dict__.get(SCALE) or (Seen(), None, weight, False)
    if not seen.is_(weight) or then != state:  # made once; and the answer waits for the GPU
        scale = weight.detach().float() + offset
        suffice = codes_suffice(scale)
        seen.set(weight)
        norm.__dict__[SCALE] = seen, state, scale, suffice
    return Norm(scale, cast(float, epsilon), suffice)


def projections_of(
    layers: Sequence[nn.Module], x: torch.Tensor, norm: nn.Module | None = None
) -> list[Projection] | None:
    """What the layers compute, or None where one of them, or the norm before them, is not fused for x."""
    kind = x.device.type
    if norm is not None and (_hooked(norm) or not _frozen(norm._parameters.get("weight"))):
        return None
    if torch.compiler.is_compiling():  # the ops of the plain layers compile; launches from inside a function do not
        return None
    if x.dtype != torch.bfloat16 or (torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) != x.dtype):
        return None
    found = []
    for layer in layers:
        projection = projection_of(layer)
        if projection is None:
            return None
        if projection.weight.codes.device != x.device:
            got = f"inputs on {x.device}, weights on {projection.weight.codes.device}"
            fix = "nn.DataParallel, which a Trainer takes on several GPUs, cannot copy them: start it with torchrun."
            raise UnsupportedError("fused FP8 layers", got=got, need="one device", fix=fix)
        if isinstance(projection.weight.granularity, PerBlock):
            run = blocks_run(projection.weight.shape, x.device) and x.shape[:-1].numel() % 4 == 0
        else:
            run = products_run(projection.weight.shape, x.device)
        if not run:
            return None
        found.append(projection)
    by_blocks = {isinstance(projection.weight.granularity, PerBlock) for projection in found}
    rates = {projection.dropout for projection in found if projection.a is not None}
    if any(rates) and _captured(x):  # every replay would drop the same
        return None
    return found if len(by_blocks) < 2 and len(rates) < 2 else None


def projection_of(layer: nn.Module) -> Projection | None:
    """The layer as a Projection: an FP8 linear, one plain adapter or none.

    Weights per row or tensor with inputs per token, or per 128 x 128 block with inputs per group of 128.
    """
    base = layer.base_layer if isinstance(layer, LoraLinear) else layer
    if _hooked(layer) or _hooked(base):  # hooks see inputs and outputs that do not exist here
        return None
    if not isinstance(base, FrozenFloat8Linear) or base.rule.spec.name != "e4m3" or isinstance(base.weight, DTensor):
        return None
    if base.rule.granularity not in MULTIPLIED.get(base.activation, ()):
        return None
    if base.bias is not None and not _frozen(base.bias):
        return None
    plain = Projection(base.scaled(), base.bias)
    if not isinstance(layer, LoraLinear) or layer.disable_adapters != layer.merged:
        return plain
    if layer.merged:  # PEFT takes the adapter out again first
        return None
    names = [name for name in layer.active_adapters if name in layer.lora_A]
    if not names:
        return plain
    if len(names) > 1 or layer.lora_bias[names[0]] or names[0] in layer.lora_variant:
        return None
    dropout = layer.lora_dropout[names[0]]
    if type(dropout) not in (nn.Dropout, nn.Identity):  # one that drops whole channels, say
        return None
    rate = exact_rate(dropout.p) if isinstance(dropout, nn.Dropout) and dropout.training else 0.0
    if rate == 1.0:  # nothing of the adapter is left
        return None
    a, b = layer.lora_A[names[0]].weight, layer.lora_B[names[0]].weight
    if isinstance(a, DTensor) or isinstance(b, DTensor):
        return None
    return Projection(plain.weight, plain.bias, a, b, layer.scaling[names[0]], rate)


def _captured(x: torch.Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def _frozen(parameter: torch.Tensor | None) -> bool:
    return parameter is not None and not parameter.requires_grad and not isinstance(parameter, DTensor)


def _hooked(layer: nn.Module) -> bool:
    if "_hf_hook" in layer.__dict__:  # accelerate's, inside of the forward that it wrapped
        return True
    return bool(layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks)


@lru_cache(maxsize=1024)
def products_run(shape: tuple[int, ...], device: torch.device) -> bool:
    """Whether backend `native` multiplies by a weight of this shape on the device, both ways."""
    n, k = shape
    problems = [Problem(op, device.type, activation="token", n=n, k=k) for op in ("linear", "linear_dx")]
    return all(BACKENDS["native"].refuse(problem, caps_of(device)) is None for problem in problems)


@lru_cache(maxsize=1024)
def blocks_run(shape: tuple[int, ...], device: torch.device) -> bool:
    """The same for a weight with scales per 128 x 128 block; dX takes them and the codes transposed."""
    n, k = shape
    problem = Problem("linear", device.type, tile=(128, 128), activation="group128", m=4, n=n, k=k)
    return BACKENDS["native"].refuse(problem, caps_of(device)) is None
