"""Every known text is recognized as itself; an unknown one gets the three nearest."""

import pytest

from octavo.workflows.explain import KNOWN_ERRORS, ExplainConfig, explain


def test_there_are_at_least_60_with_distinct_keys():
    assert len({error.key for error in KNOWN_ERRORS}) == len(KNOWN_ERRORS) >= 60


@pytest.mark.parametrize("error", KNOWN_ERRORS, ids=lambda e: e.key)
def test_each_text_is_recognized(error):
    log = f"INFO 11-29 engine started\nERROR 11-29 [core.py:1] {error.example}\nTraceback follows"
    report = explain(ExplainConfig(text=log))
    assert report.known
    assert error.key in [explanation.key for explanation in report.explanations]
    assert error.cause and error.fix


def test_the_most_specific_match_comes_first():
    text = "ValueError: There is no module or parameter named 'lm_head.weight_scale' in LlamaForCausalLM"
    assert explain(text).explanations[0].key == "vllm-no-parameter-scale"


def test_line_breaks_do_not_matter():
    text = "The `fp8` quantization method no longer supports online\n    quantization."
    assert explain(text).explanations[0].key == "vllm-online-fp8"


def test_unknown_text_gets_the_three_nearest():
    report = explain("the scale grid of the weight does not fit its block")
    assert not report.known
    assert len(report.explanations) == 3
    assert not explain("segmentation fault").known
    assert "cublas" in explain("CUBLAS status 7 in cublas matmul").explanations[0].key


def test_a_long_log_is_quick():
    assert not explain("a" * 5_000_000 + " nothing here").known
