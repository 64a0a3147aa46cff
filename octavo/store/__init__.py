"""Bytes on disk: safetensors in and out, engines' spellings, manifests, scales.json, streaming conversion."""
