"""The bundled tasks are what they say, the same everywhere, and scored as greedy decoding would."""

import hashlib
import json
import re
from functools import partial

import pytest
import torch
from transformers import AutoTokenizer

from octavo.base.errors import ConfigError
from octavo.integrations.measuring import load_base, logits
from octavo.integrations.tasks import (
    BUNDLED,
    Item,
    TaskScore,
    arithmetic,
    make_task,
    retrieval,
    right_answers,
    sign_test,
)


def test_every_line_of_arithmetic_is_true():
    for item in arithmetic(60):
        lines = (item.prompt + item.answer).splitlines()
        assert len(lines) == 9
        for line in lines:
            a, sign, b, result = re.fullmatch(r"(\d+) ([+-]) (\d+) = (\d+)", line).groups()
            assert int(result) == (int(a) + int(b) if sign == "+" else int(a) - int(b)) >= 0
    assert max(int(n) for item in arithmetic(60)[::3] for n in re.findall(r"(\d+) [+-] (\d+)", item.prompt)[-1]) <= 9


def test_codes_to_be_found_are_in_the_list_once():
    for item, size in zip(retrieval(30), (4, 12, 24) * 10, strict=True):
        codes = dict(re.findall(r"The code of (\w+) is (\d{4})\.", item.prompt))
        asked = re.findall(r"code of (\w+)\? Answer:( \d+)?", item.prompt)
        assert len(codes) == size and len({name for name, _ in asked}) == 3
        assert [answer.strip() for _, answer in asked] == [codes[name] for name, _ in asked[:2]] + [""]
        assert item.answer == f" {codes[asked[2][0]]}\n"


def test_the_same_on_every_machine():
    digest = {
        name: hashlib.sha256(json.dumps([(i.prompt, i.answer) for i in make_task(name, 50)]).encode()).hexdigest()[:16]
        for name in BUNDLED
    }
    assert digest == {"arithmetic": "3457295af86eccef", "retrieval": "283aa107af956e11"}
    assert make_task("retrieval", 5, seed=1) != make_task("retrieval", 5) == make_task("retrieval", 50)[:5]
    with pytest.raises(ConfigError, match="Did you mean 'arithmetic'"):
        make_task("arithmetics", 1)


def test_right_is_what_greedy_decoding_writes(tiny_llama):
    """A model of random weights: what it really generates is a right answer, anything else a wrong one."""
    model = load_base(tiny_llama, None, device="cpu", dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    items, want = [], []
    for item in arithmetic(4):
        ids = tokenizer(item.prompt, return_tensors="pt")["input_ids"]
        made = model.generate(ids, max_new_tokens=3, do_sample=False)[0, ids.shape[1] :].tolist()
        continuation = tokenizer.decode(made)
        if tokenizer(continuation, add_special_tokens=False)["input_ids"] == made:  # else no text stands for it
            items.append(Item(item.prompt, continuation))
            want.append(True)
        items.append(item)
        want.append(False)
    assert want.count(True)
    assert right_answers(partial(logits, model), tokenizer, items, "") == want


def test_paired_scores():
    ours, theirs = [True] * 6 + [False] * 4, [True] * 5 + [False] * 2 + [True] * 3
    score = TaskScore.of("sums", ours, theirs)
    assert (score.accuracy, score.reference_accuracy, score.lost, score.gained) == (0.6, 0.8, 3, 1)
    assert score.accuracy_se == pytest.approx((0.6 * 0.4 / 10) ** 0.5) and score.within_noise
    assert TaskScore.of("sums", ours).lost is None


@pytest.mark.parametrize(("lost", "gained", "p"), [(0, 0, 1), (1, 0, 1), (6, 0, 2 / 64), (5, 1, 14 / 64), (3, 3, 1)])
def test_sign_test_is_exact(lost, gained, p):
    assert sign_test(lost, gained) == sign_test(gained, lost) == pytest.approx(p)


@pytest.mark.slow
def test_the_demo_model_scores_neither_nothing_nor_all(demo_model):
    model = load_base(demo_model, None, device="cpu", dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    for name in BUNDLED:
        right = right_answers(partial(logits, model), tokenizer, make_task(name, 6), name)
        assert 1 <= sum(right) <= 5, (name, sum(right))
