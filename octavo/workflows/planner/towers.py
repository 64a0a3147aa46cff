"""Vision towers by formula: CLIP and SigLIP, and the projectors of Llava and Gemma 3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.base.errors import ConfigError

Shapes = dict[str, tuple[int, ...]]
# What a config leaves out because it is the class's default (CLIPVisionConfig, SiglipVisionConfig of Transformers).
DEFAULTS: dict[str, dict[str, Any]] = {
    "clip_vision_model": {
        "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "image_size": 224, "patch_size": 32,
    },
    "siglip_vision_model": {
        "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "image_size": 224, "patch_size": 16,
        "vision_use_head": True,
    },
}  # fmt: skip


def tower(vision: Mapping[str, Any]) -> Shapes:
    """The encoder. ConfigError for one that is neither CLIP nor SigLIP."""
    kind = str(vision.get("model_type"))
    if kind not in DEFAULTS:
        fix = "Give the folder with its safetensors files: their headers are exact."
        raise ConfigError(f"vision tower '{kind}' has no formula here", need=" or ".join(DEFAULTS), fix=fix)
    v = {**DEFAULTS[kind], **{key: value for key, value in vision.items() if value is not None}}
    h, f, patch, clip = v["hidden_size"], v["intermediate_size"], v["patch_size"], kind == "clip_vision_model"
    patches = (v["image_size"] // patch) ** 2
    root = "model.vision_tower."
    shapes: Shapes = {
        f"{root}embeddings.patch_embedding.weight": (h, v.get("num_channels", 3), patch, patch),
        f"{root}embeddings.position_embedding.weight": (patches + clip, h),
    }
    if clip:
        shapes[f"{root}embeddings.class_embedding"] = (h,)
        shapes |= _affine(f"{root}pre_layrnorm", h)
    else:
        shapes[f"{root}embeddings.patch_embedding.bias"] = (h,)
    for layer in range(v["num_hidden_layers"]):
        prefix = f"{root}encoder.layers.{layer}."
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            shapes |= _linear(f"{prefix}self_attn.{name}", h, h)
        shapes |= _linear(f"{prefix}mlp.fc1", f, h) | _linear(f"{prefix}mlp.fc2", h, f)
        shapes |= _affine(f"{prefix}layer_norm1", h) | _affine(f"{prefix}layer_norm2", h)
    shapes |= _affine(f"{root}post_layernorm", h)
    if v.get("vision_use_head"):
        shapes |= {f"{root}head.probe": (1, 1, h), f"{root}head.attention.in_proj_weight": (3 * h, h)}
        shapes[f"{root}head.attention.in_proj_bias"] = (3 * h,)
        shapes |= _linear(f"{root}head.attention.out_proj", h, h) | _affine(f"{root}head.layernorm", h)
        shapes |= _linear(f"{root}head.mlp.fc1", f, h) | _linear(f"{root}head.mlp.fc2", h, f)
    return shapes


def projector(config: Mapping[str, Any], vision: Mapping[str, Any], hidden: int) -> Shapes:
    """From the tower's width to the language model's."""
    kind, root = config.get("model_type"), "model.multi_modal_projector."
    width = vision.get("hidden_size") or DEFAULTS[str(vision["model_type"])]["hidden_size"]
    if kind == "gemma3":
        return {f"{root}mm_input_projection_weight": (width, hidden), f"{root}mm_soft_emb_norm.weight": (width,)}
    if kind == "llava":
        features = config.get("vision_feature_layer", -2)
        count = len(features) if isinstance(features, list) else 1
        bias = config.get("multimodal_projector_bias", True)
        shapes = _linear(f"{root}linear_1", hidden, width * count) | _linear(f"{root}linear_2", hidden, hidden)
        return shapes if bias else {name: shape for name, shape in shapes.items() if len(shape) > 1}
    fix = "Give the folder with its safetensors files: their headers are exact."
    raise ConfigError(f"the projector of model_type '{kind}' has no formula here", need="llava or gemma3", fix=fix)


def _linear(name: str, rows: int, cols: int) -> Shapes:
    return {f"{name}.weight": (rows, cols), f"{name}.bias": (rows,)}


def _affine(name: str, width: int) -> Shapes:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}
