"""Imported by vLLM's interpreter: which modules of a Llama vLLM's own config classes quantize."""

import torch

FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


def native(raw, modules):
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config
    from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped

    config = Fp8Config.from_config(raw)
    return [answer(lambda n=name: not is_layer_skipped(n, config.ignored_layers, FUSED)) for name, _ in modules]


def compressed_tensors(raw, modules):
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig

    config = CompressedTensorsConfig.from_config(raw)
    config.packed_modules_mapping = FUSED
    layers = {kind: type(kind, (torch.nn.Module,), {})() for _, kind in modules}
    return [answer(lambda n=n, k=k: config.get_scheme_dict(layers[k], n) is not None) for n, k in modules]


def modelopt(raw, modules):
    from vllm.model_executor.layers.quantization.modelopt import ModelOptFp8Config

    config = ModelOptFp8Config.from_config(raw)
    config.packed_modules_mapping = FUSED
    return [answer(lambda n=name: not config.is_layer_excluded(n)) for name, _ in modules]


def answer(question):
    try:
        return "fp8" if question() else "plain"
    except ValueError:
        return "error"


METHODS = {"fp8": native, "compressed-tensors": compressed_tensors, "modelopt": modelopt}


def quantized(configs, modules):
    """Of each config, for each (name, class name): `fp8`, `plain` or `error`."""
    return [METHODS[raw["quant_method"]](raw, modules) for raw in configs]
