"""Models for every test: the demo model, and tiny ones with random weights. Shared and read-only: copy to change."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads make a busy machine crawl; read when torch loads
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

TINY = {"vocab_size": 264, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


# What covers octavo/formats and octavo/store. Following every call of the others, most of them into torch and
# transformers, would take 40 % more time.
COVERING = ("formats", "store", "workflows/test_export.py", "pipelines/test_tune.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    folders = [Path(__file__).parent / name for name in COVERING]
    for item in items:
        if not any(item.path.is_relative_to(folder) for folder in folders):
            item.add_marker("no_cover")


@pytest.fixture(autouse=True)
def same_numbers_every_time() -> None:
    """Random weights and inputs of a test do not depend on the tests before it."""
    import torch

    torch.manual_seed(0)


@pytest.fixture
def mount_small(tmp_path: Path) -> Iterator[Callable[[int, str], Path]]:
    """mount_small(kilobytes, name) -> tmp_path/name, a file system of that size; skips where none can be mounted."""
    mounted = []

    def mount(kilobytes: int, name: str) -> Path:
        place = tmp_path / name
        place.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "none", str(place)]
        if subprocess.run(command, capture_output=True).returncode:
            pytest.skip("mounting a tmpfs is not allowed here")
        mounted.append(place)
        return place

    yield mount
    for place in mounted:
        subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """SmolLM2-135M-Instruct, BF16. Made once per cache folder (about 40 s): mark tests that use it `slow`."""
    from octavo.integrations.demo import demo_folder

    return demo_folder()


@pytest.fixture(scope="session")
def tiny_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A byte-level tokenizer (256 bytes and 4 special tokens) with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate([*special, *letters])}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(special)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=special[0], pad_token=special[3])
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


@pytest.fixture(scope="session")
def save_tiny(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Any) -> Callable[..., Path]:
    """save_tiny(config, name="", **save_pretrained arguments) -> folder of a BF16 model of random weights."""

    def save(config: Any, name: str = "tiny", **arguments: Any) -> Path:
        import torch
        from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

        torch.manual_seed(0)
        kind = AutoModelForCausalLM if type(config) in AutoModelForCausalLM._model_mapping else None
        model = (kind or AutoModelForImageTextToText).from_config(config).to(torch.bfloat16)
        model.config.dtype = torch.bfloat16
        folder = tmp_path_factory.mktemp(name)
        model.save_pretrained(folder, **arguments)
        tiny_tokenizer.save_pretrained(folder)
        return folder

    return save


@pytest.fixture(scope="session")
def tiny_llama(save_tiny: Callable[..., Path]) -> Path:
    """Two layers, hidden 64, tied head; every size a multiple of 16 and none of 128."""
    from transformers import LlamaConfig

    return save_tiny(LlamaConfig(hidden_size=64, intermediate_size=176, tie_word_embeddings=True, **TINY), "llama")


@pytest.fixture(scope="session")
def tiny_llama_128(save_tiny: Callable[..., Path]) -> Path:
    """Two layers whose linears are all multiples of 128, untied head."""
    from transformers import LlamaConfig

    sizes = {**TINY, "head_dim": 64, "hidden_size": 256, "intermediate_size": 384, "tie_word_embeddings": False}
    return save_tiny(LlamaConfig(**sizes), "llama128")


@pytest.fixture(scope="session")
def tiny_moe(save_tiny: Callable[..., Path]) -> Path:
    """Qwen3-MoE: two layers, 8 experts, 2 of them per token; the files hold one tensor per expert."""
    from transformers import Qwen3MoeConfig

    moe = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "decoder_sparse_step": 1}
    config = Qwen3MoeConfig(hidden_size=64, intermediate_size=128, tie_word_embeddings=False, **moe, **TINY)
    return save_tiny(config, "moe")


@pytest.fixture(scope="session")
def tiny_vlm(save_tiny: Callable[..., Path]) -> Path:
    """Llava: a CLIP tower, a projector and a Llama."""
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig

    vision = CLIPVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=8
    )
    text = LlamaConfig(hidden_size=64, intermediate_size=176, **TINY)
    return save_tiny(LlavaConfig(vision_config=vision, text_config=text, image_token_index=263), "vlm")
