"""Decoding for `model.generate`: a cache made once, and on a GPU one CUDA graph for a whole step or a short prompt.

decoder = octavo.Decoder(model, capacity=4096).warmup()
model.generate(**inputs, max_new_tokens=200, custom_generate=decoder)
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self, cast

import torch
from torch import nn
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from octavo.base.errors import ConfigError, RefusedError, ShapeError, UnsupportedError
from octavo.integrations.decode_inputs import (
    STOP_TOKENS,
    end_tokens,
    is_padded,
    pad_token,
    require_same,
    weights_of,
)
from octavo.integrations.decoder_step import DecoderStep
from octavo.integrations.float8_cache import layer_scales
from octavo.modules.kv_storage import Granularity, KVStorage, lasting
from octavo.ops.attention import CachedKV, why_not
from octavo.ops.graphs import capture
from octavo.store.scales import Scales

FEWEST = 4  # tokens: what a step writes before it is captured
POLL = 16  # steps between two looks at whether all rows have ended
# Prompts of so many tokens in all have graphs, for lengths that are multiples of GRAPH_STEP: their launches would take
# longer than their products. What is behind the end of a prompt is written over by the answer.
GRAPH_TOKENS, GRAPH_STEP = 2048, 128
NONE = -1


class Decoder:
    """Greedy and sampled decoding with everything that changes from token to token in place.

    model: Llama, Mistral, Qwen2 or Qwen3 on one device, weights in 16 bit or `octavo.load`'s FP8. Its q, k, v and gate,
        up weights become views of packed ones; to train, load it again.
    capacity: tokens of prompt and answer together that there is room for.
    kv_cache: `token-head` or `tensor` (FP8; see Float8Cache, which `scales` are of) or `16bit`.
    graph: default on a GPU, where it is what makes decoding fast; without, the same step runs op by op. Prompts without
        padding of up to GRAPH_TOKENS tokens get graphs, too, each when a length comes for the second time.

    Greedy decoding happens on the device alone, up to POLL steps past the last end of a row, which are cut off. With a
    sampler, a logits processor or other stopping criteria the logits of each step pass through them. A streamer gets
    nothing: Transformers does not hand it to a loop of somebody else's.
    UnsupportedError: beams, `return_dict_in_generate`, padding at the right, or a model that a step does not know.
    ShapeError: no room. MismatchError: a token without an embedding. ConfigError: weights that were moved or exchanged.
    RefusedError: logits that are NaN.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        capacity: int,
        kv_cache: Granularity = "token-head",
        scales: Scales | Path | str | Mapping[int, tuple[float, float]] | None = None,
        graph: bool | None = None,
    ) -> None:
        if capacity < FEWEST:
            raise ConfigError("Decoder: capacity", got=str(capacity), need=f"{FEWEST} tokens or more")
        if kv_cache not in ("token-head", "tensor", "16bit") or (scales is not None and kv_cache != "tensor"):
            raise ConfigError(
                "Decoder: kv_cache", got=kv_cache, need="token-head, 16bit, or tensor, which takes scales"
            )
        self.model, self.capacity, self.kv_cache = model, capacity, kv_cache
        self.step = DecoderStep(model, capacity)
        self.device, self.weights = self.step.embedding.weight.device, weights_of(model)
        self.scales = layer_scales(scales, list(range(len(self.step.layers))))
        self.graph = self.device.type == "cuda" if graph is None else graph
        if self.device.type == "cuda":
            kind = {"tensor": 0, "token-head": 1, "16bit": 2}[kv_cache]
            if reason := why_not(self.step.width, self.device, self.step.dtype, kind):
                raise UnsupportedError("Decoder", got=reason, fix="Use model.generate without it.")
        self.state: _State | None = None

    @lasting()
    def warmup(self, batch: int = 1, *, padded: bool = False, prompt: int = 0) -> Self:
        """Allocate, compile and capture for `batch` rows: what the first call of that size would otherwise do.

        padded: for prompts of different lengths, padded at the left. prompt: also for prompts of so many tokens.
        """
        if batch < 1 or prompt > self.capacity:
            got, need = f"{batch} rows, a prompt of {prompt}", f"1 row or more, {self.capacity} tokens at most"
            raise ShapeError("Decoder.warmup", got=got, need=need)
        if self.state is None or self.state.batch != batch or padded > self.state.padded:
            self.state = None  # the memory of the other size first
            self.state = _State(self, batch, padded)
        if prompt:
            self.state.graph_of(prompt, now=True)
        return self

    @torch.no_grad()
    def __call__(
        self,
        model: nn.Module,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList | None = None,
        stopping_criteria: StoppingCriteriaList | None = None,
        generation_config: GenerationConfig | None = None,
        **inputs: Any,
    ) -> torch.Tensor:
        """What `generate` calls: input_ids int64 [B, P] -> [B, P + new]. inputs: `attention_mask` [B, P], if any."""
        config = generation_config or GenerationConfig()
        if model is not self.model:
            raise ConfigError("Decoder", got="another model", need="the one it was made for")
        if (config.num_beams or 1) > 1 or config.return_dict_in_generate or inputs.get("inputs_embeds") is not None:
            got = "beams, return_dict_in_generate or inputs_embeds"
            raise UnsupportedError("Decoder", got=got, fix="Use model.generate without custom_generate.")
        attention_mask, vocabulary = inputs.get("attention_mask"), self.step.vocabulary
        padded = is_padded(input_ids, attention_mask, vocabulary)
        require_same(self.weights)
        batch, prompt = input_ids.shape
        longest = max(int(config.max_length or 0), prompt + 1)
        if longest > self.capacity:
            fix = f"Make the decoder with capacity={longest}, or ask for fewer new tokens."
            raise ShapeError("Decoder", got=f"up to {longest} tokens", need=f"{self.capacity}, its capacity", fix=fix)
        ends = end_tokens(config, self.device)
        pad = 0 if ends is None else pad_token(config, ends, vocabulary)
        state = cast(_State, self.warmup(batch, padded=padded).state)
        logits = state.prefill(input_ids.to(self.device), attention_mask if padded else None)
        state.start(prompt, ends, pad)
        processors, criteria = logits_processor or LogitsProcessorList(), stopping_criteria or StoppingCriteriaList()
        alone = all(type(c) in (MaxLengthCriteria, EosTokenCriteria) for c in criteria)
        if config.do_sample or len(processors) or not alone:
            return _processed(state, logits, input_ids, config, processors, criteria, ends)
        answers = _greedy(state, logits, prompt, longest, ends)
        return torch.cat((input_ids, answers.to(input_ids.device)), dim=1)


class _State:
    """What a batch size needs: caches, the buffers of a step, and its graph."""

    def __init__(self, decoder: Decoder, batch: int, padded: bool) -> None:
        # Not the decoder itself: in a cycle the graph of an earlier batch size would outlive it.
        self.step, self.batch, self.padded, self.capacity = decoder.step, batch, padded, decoder.capacity
        step, device = decoder.step, decoder.device
        shape = batch, step.kv_heads, 0, step.width
        like = torch.empty(shape, dtype=step.dtype, device=device)
        self.storages = [
            KVStorage(decoder.kv_cache, decoder.scales.get(i, (1.0, 1.0)), decoder.capacity)
            for i in range(len(step.layers))
        ]
        for storage in self.storages:
            storage.kv = storage.allocate(like, like, decoder.capacity)
        self.tokens = torch.zeros(batch, dtype=torch.int64, device=device)
        self.length = torch.zeros(1, dtype=torch.int32, device=device)
        self.padding = torch.zeros(batch, dtype=torch.int32, device=device)
        self.mask = torch.ones(batch, decoder.capacity, dtype=torch.uint8, device=device)
        self.history = torch.zeros(batch, decoder.capacity + 1, dtype=torch.int64, device=device)
        self.ended = torch.zeros(batch, dtype=torch.bool, device=device)
        self.stops = torch.full((STOP_TOKENS,), NONE, dtype=torch.int64, device=device)
        self.pad = torch.zeros(1, dtype=torch.int64, device=device)
        self.best = torch.zeros(batch, device=device)
        self.captured = capture(self._step, device) if decoder.graph else None
        self.prompts: dict[int, _PromptGraph | None] = {}  # None: a length that came once

    @property
    def caches(self) -> list[CachedKV]:
        return [cast(CachedKV, storage.kv) for storage in self.storages]

    def prefill(self, prompt: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
        """The prompt [B, P] into the caches -> logits [B, V] of its last tokens."""
        for storage in self.storages:
            storage.reset()
        self.mask.fill_(1)
        self.padding.zero_()
        if attention_mask is not None:
            seen = attention_mask.to(self.tokens.device)
            self.mask[:, : seen.shape[1]] = seen
            self.padding.copy_((seen == 0).sum(1))
            return self.step.prompt(prompt, self.caches, self.mask, self.padding)
        graph = self.graph_of(prompt.shape[1])
        return self.step.prompt(prompt, self.caches) if graph is None else graph(prompt)

    @lasting()
    def graph_of(self, count: int, now: bool = False) -> _PromptGraph | None:
        """For prompts of `count` tokens without padding; now: do not wait until a length comes again."""
        size = -(-count // GRAPH_STEP) * GRAPH_STEP
        windows = [layer.window for layer in self.step.layers if layer.window]
        if self.captured is None or size > min([self.capacity, GRAPH_TOKENS // self.batch, *windows]):
            return None
        if self.prompts.get(size) is None:
            again = now or size in self.prompts
            self.prompts[size] = _PromptGraph(self, size) if again else None
        return self.prompts[size]

    def start(self, prompt: int, ends: torch.Tensor | None, pad: int) -> None:
        """A prompt of so many tokens is in the caches."""
        self.length.fill_(prompt)
        self.ended.zero_()
        self.best.zero_()
        self.pad.fill_(pad)
        self.stops.fill_(NONE)
        if ends is not None:
            self.stops[: len(ends)] = ends

    def advance(self) -> None:
        """One step: `logits` of `tokens`, of which the most likely become the next `tokens`."""
        if self.captured is not None:
            self.captured.replay()
        else:
            self._step()

    def most_likely(self, logits: torch.Tensor) -> torch.Tensor:
        """logits [B, V] -> int64 [B]. `best`, the largest logit so far, remembers a NaN."""
        following = logits.argmax(-1)
        torch.maximum(self.best, logits.gather(1, following[:, None])[:, 0], out=self.best)
        return following

    def take(self, following: torch.Tensor) -> None:
        """following int64 [B]: tokens behind those in the caches. Rows that have ended get the pad token."""
        following = torch.where(self.ended, self.pad, following)
        self.ended.logical_or_((following[:, None] == self.stops).any(1))
        place = self.length.to(torch.int64).expand(self.batch, 1)
        self.history.scatter_(1, place, following[:, None])
        self.tokens.copy_(following)

    def _step(self) -> None:
        mask, padding = (self.mask, self.padding) if self.padded else (None, None)
        self.logits = self.step(self.tokens, self.caches, self.length, mask, padding)
        self.length.add_(1)
        self.take(self.most_likely(self.logits))


class _PromptGraph:
    """Prompts of up to `size` tokens a row into the caches of `state`."""

    def __init__(self, state: _State, size: int) -> None:
        step, caches, device = state.step, state.caches, state.tokens.device
        tokens = self.tokens = torch.zeros(state.batch, size, dtype=torch.int64, device=device)
        last = self.last = torch.zeros(1, dtype=torch.int64, device=device)
        found = self.found = [torch.empty(0)]

        def run() -> None:
            found[:] = [step.prompt(tokens, caches, last=last)]

        self.graph = capture(run, device, warm=1, beside=state.captured)

    def __call__(self, prompt: torch.Tensor) -> torch.Tensor:
        """prompt [B, P] -> logits [B, V], good until the next graph runs."""
        self.tokens[:, : prompt.shape[1]] = prompt
        self.last.fill_(prompt.shape[1] - 1)
        self.graph.replay()
        return self.found[0]


def _greedy(state: _State, logits: torch.Tensor, prompt: int, longest: int, ends: torch.Tensor | None) -> torch.Tensor:
    state.take(state.most_likely(logits))
    steps = longest - prompt - 1
    for done in range(steps):
        if ends is not None and done % POLL == 0 and bool(state.ended.all()):
            break
        state.advance()
    else:
        done = max(steps, 0)
    _require_numbers(~state.best.isnan())
    answers = state.history[:, prompt : prompt + 1 + done]
    if ends is not None:
        stopped = (answers[..., None] == ends).any(-1)
        first = torch.where(stopped.any(1), stopped.int().argmax(1), answers.shape[1] - 1)
        answers = answers[:, : int(first.max()) + 1]
    return answers


def _processed(
    state: _State,
    logits: torch.Tensor,
    input_ids: torch.Tensor,
    config: GenerationConfig,
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    ends: torch.Tensor | None,
) -> torch.Tensor:
    """Each step's logits pass through Transformers' processors, sampler and criteria; its own choice is not taken."""
    tokens, ended = input_ids.to(logits.device), torch.zeros_like(state.ended)
    while True:
        scores = processors(tokens, logits.to(torch.float32))
        best = scores.amax(-1)
        _require_numbers(best.isfinite() if config.do_sample else ~best.isnan())
        if config.do_sample:
            following = torch.multinomial(scores.softmax(-1), 1)[:, 0]
        else:
            following = scores.argmax(-1)
        if ends is not None:
            following = torch.where(ended, state.pad, following)
        tokens = torch.cat((tokens, following[:, None]), dim=1)
        ended.logical_or_(criteria(tokens, scores))
        if bool(ended.all()):
            break
        state.tokens.copy_(following)
        state.advance()
        logits = state.logits
    return tokens.to(input_ids.device)


def _require_numbers(rows: torch.Tensor) -> None:
    """rows: bool [B], whether its scores are numbers to choose a token by."""
    if not bool(rows.all()):
        got = f"NaN or infinity in row {int(rows.int().argmin())}"
        fix = "float16 ends at 65504: load the model in bfloat16, or look at its weights with octavo verify."
        raise RefusedError("Decoder: the scores of the next token", got=got, need="numbers", fix=fix)
