"""A small language model of another architecture, trained here on the demo's training text, to try claims on.

    python benchmarks/small_model.py OUT --family qwen3     or gpt_neox, gemma3, ...; about a minute on two cores
    python benchmarks/rounding.py block128 --model OUT

Its weights and activations are those of a trained model: outliers, correlated inputs, layers that matter unequally.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from octavo.integrations.data import load_data, token_windows

VOCABULARY = 1024
CONTEXT, BATCH = 64, 8
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
FAMILIES = {name: name for name in ("llama", "qwen2", "qwen3", "phi3", "gpt_neox", "opt")} | {"gemma3": "gemma3_text"}


def tokenizer_of(texts: list[str]) -> PreTrainedTokenizerFast:
    """Byte-pair encoding of these texts."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=["<|end|>"], initial_alphabet=alphabet)
    inner.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|end|>", pad_token="<|end|>")


def train(family: str, windows: torch.Tensor, steps: int) -> torch.nn.Module:
    """AdamW in float32, the same weights for the same seed and machine."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(FAMILIES[family], **SIZES)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    for step in range(steps):
        batch = windows[torch.randint(len(windows), (BATCH,))]
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step}: loss {float(loss):.3f}", flush=True)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("--family", choices=FAMILIES, default="qwen3")
    parser.add_argument("--steps", type=int, default=300)
    arguments = parser.parse_args()
    texts = load_data("demo", "train").texts()
    tokenizer = tokenizer_of(texts)
    model = train(arguments.family, token_windows(tokenizer, texts, CONTEXT), arguments.steps).to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    model.save_pretrained(arguments.out)
    tokenizer.save_pretrained(arguments.out)


if __name__ == "__main__":
    main()
