"""Imported by vLLM's interpreter: which group of a compressed-tensors config vLLM picks for a module."""

import torch

FUSED = {
    "qkv_proj": ["q_proj", "k_proj", "v_proj"],
    "gate_up_proj": ["gate_proj", "up_proj"],
    "fused_qkv_a_proj": ["q_a_proj", "kv_a_proj_with_mqa"],
}


def strategies(raw, modules):
    """Of the weights of each (name, class name); null for a module in 16 bit."""
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig

    config = CompressedTensorsConfig.from_config(raw)
    config.packed_modules_mapping = FUSED
    config._add_fused_moe_to_target_scheme_map()
    found = [config.get_scheme_dict(type(kind, (torch.nn.Module,), {})(), name) for name, kind in modules]
    return [scheme and str(scheme["weights"].strategy) for scheme in found]
