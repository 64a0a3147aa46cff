"""Tasks with one right answer that need no download: sums, and codes to be found again in a list. Exact match.

An item is right when greedy decoding would write exactly its answer, the end of the line included. That is so if and
only if each token of the answer comes first after those before it: one forward pass decides it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from octavo.base.errors import ConfigError, DataError, did_you_mean
from octavo.base.log import progress
from octavo.base.report import Report
from octavo.integrations.scoring import Logits

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SHOTS = 8
_SYLLABLES = ("ba", "do", "ke", "li", "mo", "nu", "pa", "ri", "so", "ta", "ve", "zu")


@dataclass(frozen=True)
class Item:
    """What the model reads, and the one right continuation."""

    prompt: str
    answer: str


class TaskScore(Report):
    """accuracy: share of right items, with its standard error. lost, gained: items that only the reference, or only the
    model, answers rightly. within_noise: chance alone would often (p >= 0.05, exact sign test) give such a difference.
    """

    name: str
    items: int
    accuracy: float
    accuracy_se: float
    reference_accuracy: float | None = None
    lost: int | None = None
    gained: int | None = None
    within_noise: bool | None = None

    @classmethod
    def of(cls, name: str, right: Sequence[bool], reference: Sequence[bool] | None = None) -> TaskScore:
        """From what was right, item by item, paired with the reference's."""
        n, accuracy = len(right), sum(right) / len(right)
        score = cls(name=name, items=n, accuracy=accuracy, accuracy_se=math.sqrt(accuracy * (1 - accuracy) / n))
        if reference is None:
            return score
        lost = sum(theirs and not ours for ours, theirs in zip(right, reference, strict=True))
        gained = sum(ours and not theirs for ours, theirs in zip(right, reference, strict=True))
        update = {"reference_accuracy": sum(reference) / n, "lost": lost, "gained": gained}
        return score.model_copy(update={**update, "within_noise": sign_test(lost, gained) >= 0.05})


def sign_test(lost: int, gained: int) -> float:
    """The two-sided p of so uneven a split of lost + gained fair coins (McNemar's exact test); 1 for none."""
    n, k = lost + gained, min(lost, gained)
    return min(1.0, 2 * sum(math.comb(n, i) for i in range(k + 1)) / 2**n) if n else 1.0


def arithmetic(count: int, seed: int = 0) -> list[Item]:
    """Sums and differences of numbers up to 9, 20 and 50 in turn, after eight solved ones."""
    rng = random.Random(f"arithmetic {seed}")

    def line(limit: int) -> tuple[str, str]:
        a, b = rng.randint(0, limit), rng.randint(0, limit)
        if rng.random() < 0.5:
            return f"{a} + {b} =", f" {a + b}\n"
        return f"{max(a, b)} - {min(a, b)} =", f" {max(a, b) - min(a, b)}\n"

    items = []
    for i in range(count):
        limit = (9, 20, 50)[i % 3]
        solved = "".join("".join(line(limit)) for _ in range(SHOTS))
        question, answer = line(limit)
        items.append(Item(solved + question, answer))
    return items


def retrieval(count: int, seed: int = 0) -> list[Item]:
    """Find the code of one of 4, 12 or 24 names in turn: after the list and two questions with their answers."""
    rng = random.Random(f"retrieval {seed}")
    items = []
    for i in range(count):
        size = (4, 12, 24)[i % 3]
        codes: dict[str, int] = {}
        while len(codes) < size:
            codes["".join(rng.choices(_SYLLABLES, k=3)).capitalize()] = rng.randint(1000, 9999)
        listed = "".join(f"The code of {name} is {code}.\n" for name, code in codes.items())
        asked = rng.sample(list(codes), 3)
        lines = [f"Question: what is the code of {name}? Answer: {codes[name]}\n" for name in asked[:2]]
        prompt = f"{listed}{''.join(lines)}Question: what is the code of {asked[2]}? Answer:"
        items.append(Item(prompt, f" {codes[asked[2]]}\n"))
    return items


BUNDLED: dict[str, Callable[[int, int], list[Item]]] = {"arithmetic": arithmetic, "retrieval": retrieval}


def make_task(name: str, count: int, seed: int = 0) -> list[Item]:
    """Items of a bundled task: the same for the same seed, on every machine. ConfigError for an unknown name."""
    if name not in BUNDLED:
        raise ConfigError(f"task '{name}' is not bundled", fix=did_you_mean(name, BUNDLED))
    return BUNDLED[name](count, seed)


def right_answers(run: Logits, tokenizer: PreTrainedTokenizerBase, items: Sequence[Item], title: str) -> list[bool]:
    """Item by item, whether greedy decoding writes the answer. run: tokens int64 [T] -> logits [T, V]."""
    found = []
    with progress(title, len(items)) as advance:
        for item in items:
            prompt = list(tokenizer(item.prompt, verbose=False)["input_ids"])
            answer = list(tokenizer(item.answer, add_special_tokens=False, verbose=False)["input_ids"])
            if not prompt or not answer:
                raise DataError("a task's item", got="no tokens", need="a tokenizer that knows digits")
            first = run(torch.tensor(prompt + answer))[len(prompt) - 1 : -1].argmax(-1)
            found.append(first.tolist() == answer)
            advance(1)
    return found
