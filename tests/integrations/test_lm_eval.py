"""Tasks of lm-eval from a folder with local data, against log-likelihoods computed here; and where it is missing."""

import json
from unittest import mock

import pytest
import torch

from octavo.base.errors import ConfigError, DataError, UnsupportedError
from octavo.integrations.lm_eval import harness_answers
from octavo.integrations.measuring import logits, open_model
from octavo.workflows.evaluate import EvaluateConfig, evaluate

CHOICES = [" red", " green", " blue"]
TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "The sky over {{{{place}}}} is"
doc_to_choice: [" red", " green", " blue"]
doc_to_target: label
metric_list: [{{metric: {metric}, aggregation: {how}, higher_is_better: true}}]
"""


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """A folder with the tasks sky_color, of right and wrong, and sky_brier, which has neither."""
    folder = tmp_path_factory.mktemp("tasks")
    places = ["Rome", "the old harbour", "Mars", "a quiet village", "Oslo", "the sea"]
    documents = [json.dumps({"place": place, "label": i % 3}) for i, place in enumerate(places)]
    (folder / "sky.jsonl").write_text("\n".join(documents))
    for name, metric, data in (
        ("sky_color", "acc", "sky.jsonl"),
        ("sky_brier", "brier_score", "sky.jsonl"),
        ("no_data", "acc", "nothing.jsonl"),
    ):
        how = "mean" if metric == "acc" else metric
        text = TASK.format(name=name, metric=metric, how=how, data=folder / data)
        (folder / f"{name}.yaml").write_text(text)
    return folder


@pytest.fixture
def harness(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    return pytest.importorskip("lm_eval")


def likeliest(opened, place):
    """The choice of the largest summed log-likelihood."""
    prompt = opened.tokenizer(f"The sky over {place} is")["input_ids"]
    sums = []
    for choice in CHOICES:
        ids = torch.tensor(prompt + opened.tokenizer(choice)["input_ids"])
        logp = logits(opened.model, ids)[:-1].log_softmax(-1).gather(1, ids[1:, None])[len(prompt) - 1 :]
        sums.append(float(logp.sum()))
    return sums.index(max(sums))


def test_answers_are_those_of_the_model(harness, tiny_llama, tasks):
    opened = open_model(tiny_llama, device="cpu")
    documents = [json.loads(line) for line in (tasks / "sky.jsonl").read_text().splitlines()]
    want = [likeliest(opened, document["place"]) == document["label"] for document in documents]
    assert harness_answers(opened, ["sky_color"], None, tasks) == {"sky_color": want}
    assert harness_answers(opened, ["sky_color"], 2, tasks) == {"sky_color": want[:2]}


def test_what_lm_eval_cannot_do(harness, tiny_llama, tasks):
    opened = open_model(tiny_llama, device="cpu")
    with pytest.raises(ConfigError, match="'sky_brier' has no right and wrong"):
        harness_answers(opened, ["sky_brier"], None, tasks)
    with pytest.raises(DataError, match="could not run no_data"):
        harness_answers(opened, ["no_data"], None, tasks)


@pytest.mark.slow
def test_a_task_that_nobody_defines(harness, tiny_llama, tasks):
    with pytest.raises(ConfigError, match="'sky_colour' is unknown to lm-eval"):
        harness_answers(open_model(tiny_llama, device="cpu"), ["sky_colour"], None, tasks)


def test_not_installed():
    """Said before a model is loaded."""
    with (
        mock.patch("octavo.integrations.lm_eval.version_of", lambda package: None),
        pytest.raises(UnsupportedError, match=r"task 'hellaswag' needs lm-eval.*octavo\[eval\]"),
    ):
        evaluate(EvaluateConfig(model="no/such-model", tasks=("arithmetic", "hellaswag")))
