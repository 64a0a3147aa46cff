"""Reference FP8 kernels for vLLM on a CPU without AMX. For tests only; runs in vLLM's processes, without Octavo.

vLLM's CPU build runs one FP8 format on any machine (channel-wise weights with token-wise activations), through a
reference GEMM of oneDNN that takes seconds per token for a 135M model. Block scales, tensor scales and weight-only FP8
have no kernel; for blocks there is one on machines that report AMX, and it has been seen to die of an illegal
instruction. These kernels fill the gap, so that everything else that a checkpoint meets in vLLM (its configuration
parser, tensor names, fusing and sharding of scales, requantization of fused tensors, activation quantizers) is the
real thing. The arithmetic is FP32 over the dequantized operands.

vLLM finds the plugin through the entry point in the folder beside this file, when PYTHONPATH names the parent folder.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.kernels import linear
from vllm.model_executor.kernels.linear.scaled_mm import Fp8BlockScaledMMLinearKernel, FP8ScaledMMLinearKernel
from vllm.model_executor.layers.quantization.fp8 import Fp8Config
from vllm.model_executor.utils import replace_parameter
from vllm.platforms import current_platform

E4M3_MAX = 448.0
SMALLEST_SCALE = 1.0 / (E4M3_MAX * 512.0)  # vLLM's own floor of a dynamic scale


class OctavoReferenceFp8Kernel(FP8ScaledMMLinearKernel):
    """Tensor- or channel-scaled weights, tensor- or token-scaled activations."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return True, None

    @classmethod
    def can_implement(cls, c: Any) -> tuple[bool, str | None]:
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Keep the codes in FP32: decoding them again for every token would be most of the time."""
        name = self.layer_param_names[0]
        replace_parameter(layer, name, getattr(layer, name).data.float())

    def apply_scaled_mm(
        self,
        *,
        A: torch.Tensor,
        B: torch.Tensor,
        out_dtype: torch.dtype,
        As: torch.Tensor,
        Bs: torch.Tensor,
        bias: torch.Tensor | None,
        output_shape: list[int],
    ) -> torch.Tensor:
        y = (A.float() @ B) * As * Bs.reshape(1, -1)
        return (y if bias is None else y + bias).to(out_dtype).view(*output_shape)


class OctavoReferenceWeightOnlyKernel(OctavoReferenceFp8Kernel):
    """FP8 weights, activations as they come. vLLM hands over channel scales here, whatever the checkpoint holds."""

    def apply_weights(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        weight, scale, *_ = self._get_layer_params(layer)
        y = (x.float() @ weight) * scale.reshape(1, -1)
        return (y if bias is None else y + bias).to(x.dtype)


class OctavoReferenceBlockKernel(Fp8BlockScaledMMLinearKernel):
    """Block-scaled weights, activations in groups along the contracted dimension; both may end in a partial block."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Decode the weight once. The scales stay as they were loaded, they only no longer matter."""
        params = self._get_layer_params(layer)
        rows, columns = self.weight_group_shape
        n, k = params.weight.shape
        scale = params.block_scale.float().repeat_interleave(rows, 0)[:n].repeat_interleave(columns, 1)[:, :k]
        replace_parameter(layer, params.WEIGHT, params.weight.data.float() * scale)

    def apply_block_scaled_mm(
        self, A: torch.Tensor, B: torch.Tensor, As: torch.Tensor, Bs: torch.Tensor
    ) -> torch.Tensor:
        group = self.config.activation_quant_key.scale.group_shape.col
        return (A.float() * As.repeat_interleave(group, 1)[:, : A.shape[1]]) @ B.t()


def scaled_fp8_quant(
    input: torch.Tensor,
    scale: torch.Tensor | None = None,
    num_token_padding: int | None = None,
    scale_ub: torch.Tensor | None = None,
    use_per_token_if_dynamic: bool = False,
    output: torch.Tensor | None = None,
    group_shape: tuple[int, int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """vLLM's quantizer in torch, one scale or one per row: the CPU build declares the operator with no arguments."""
    x = input.float()
    if scale is None:
        amax = x.abs().amax(1, keepdim=True) if use_per_token_if_dynamic else x.abs().amax().view(1)
        scale = (amax if scale_ub is None else amax.clamp(max=scale_ub)) / E4M3_MAX
        scale = scale.clamp_min(SMALLEST_SCALE)
    elif scale.numel() != 1:
        raise NotImplementedError(f"static scales of shape {tuple(scale.shape)}, groups {group_shape}")
    codes = (x / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    missing = (num_token_padding or 0) - len(codes)
    if missing > 0:
        codes = torch.cat([codes, codes.new_zeros(missing, codes.shape[1])])
    return (codes, scale) if output is None else (output.copy_(codes), scale)


def register() -> None:
    """Called by vLLM in each of its processes, possibly more than once."""
    if not current_platform.is_cpu():
        return
    import vllm._custom_ops

    platform = current_platform._enum
    for table, kernel in (
        (linear._POSSIBLE_FP8_KERNELS, OctavoReferenceFp8Kernel),
        (linear._POSSIBLE_WFP8A16_KERNELS, OctavoReferenceWeightOnlyKernel),
        (linear._POSSIBLE_FP8_BLOCK_KERNELS, OctavoReferenceBlockKernel),
    ):
        kernels = table.setdefault(platform, [])
        if kernel not in kernels:
            kernels.insert(0, kernel)
    vllm._custom_ops.scaled_fp8_quant = scaled_fp8_quant
    # In 16 bit, rounding differences in front of a quantizer flip codes: comparing closely takes FP32 activations.
    Fp8Config.get_supported_act_dtypes = classmethod(lambda cls: [torch.float32, torch.bfloat16, torch.float16])
