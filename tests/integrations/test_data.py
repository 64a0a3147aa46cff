import json

import pytest

from octavo.base.errors import ConfigError, DataError
from octavo.integrations.data import load_data, load_texts, token_samples, token_windows

CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


def write_jsonl(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def write_parquet(path, columns):
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table(columns), path)
    return path


def test_text_file_is_one_record(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("First.\n\nSecond.\n")
    assert load_data(path).records == ({"text": "First.\n\nSecond.\n"},)


@pytest.mark.parametrize(
    ("record", "kind"),
    [
        ({"text": "a", "id": 1}, "text"),
        ({"messages": CHAT, "text": "ignored"}, "messages"),
        ({"prompt": "Q", "completion": "A"}, "prompt_completion"),
        ({"prompt": CHAT[:1], "completion": CHAT[1:]}, "prompt_completion"),
    ],
    ids=["text", "messages", "prompt", "prompt-messages"],
)
def test_jsonl_kinds_keep_only_their_columns(tmp_path, record, kind):
    data = load_data(write_jsonl(tmp_path / "a.jsonl", [record, record]))
    assert data.kind == kind
    assert len(data.records) == 2
    assert set(data.records[0]) == set(kind.split("_") if kind != "text" else ["text"])


def test_json_list_parquet_and_folder(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps([{"text": "one"}]))
    write_parquet(tmp_path / "b.parquet", {"text": ["two", ""], "n": [1, 2]})
    (tmp_path / "ignored.csv").write_text("x")
    assert load_texts(tmp_path) == ["one", "two"]


def test_parquet_messages(tmp_path):
    data = load_data(write_parquet(tmp_path / "b.parquet", {"messages": [CHAT]}))
    assert data.records == ({"messages": CHAT},)


def test_demo_splits_and_limit():
    assert len(load_texts("demo", "eval", limit=3)) == 3
    assert load_data("demo", "train").fingerprint != load_data("demo", "eval").fingerprint


def test_fingerprint_sees_content_and_order(tmp_path):
    prints = {
        load_data(write_jsonl(tmp_path / "a.jsonl", [{"text": t} for t in texts])).fingerprint
        for texts in (["a", "b"], ["b", "a"], ["ab"], ["a", "b"])
    }
    assert len(prints) == 3


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "is empty"),
        (b'{"text": ""}\n', "is empty"),
        (b'{"text": "a"\n', "not readable"),
        (b"\xff\xfe\xfa", "not readable"),
        (b"[1]\n", "need a record"),
        (b'{"q": "a", "a": "b"}\n', "columns q, a"),
        (b'{"text": 5}\n', "column 'text'; got int"),
        (b'{"messages": [{"from": "human"}]}\n', "column 'messages'"),
        (b'{"text": "a"}\n{"prompt": "a", "completion": "b"}\n', "a.jsonl:2: a record of kind prompt_completion"),
    ],
    ids=["empty", "blank", "json", "binary", "list", "columns", "number", "sharegpt", "mixed"],
)
def test_bad_jsonl_is_one_clear_error(tmp_path, content, complaint):
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError, match=complaint) as caught:
        load_data(path)
    assert str(tmp_path) in str(caught.value)
    assert caught.value.exit_code == 2


def test_truncated_parquet(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", {"text": ["a"] * 100})
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(DataError, match="not readable"):
        load_data(path)


@pytest.mark.parametrize("name", ["nowhere/at/all", "./none.jsonl", "none.txt", "/no/such", ""])
def test_missing_paths(name):
    with pytest.raises(DataError, match="does not exist"):
        load_data(name)


def test_unreachable_hub_dataset_names_what_was_tried():
    with pytest.raises(DataError, match="neither a file or folder here nor a dataset"):
        load_data("octavo-no-such/dataset")


def test_folder_without_data_and_unknown_suffix(tmp_path):
    with pytest.raises(DataError, match="holds no data file"):
        load_data(tmp_path)
    (tmp_path / "a.csv").write_text("x")
    with pytest.raises(DataError, match="unknown kind"):
        load_data(tmp_path / "a.csv")


def test_unknown_demo_split():
    with pytest.raises(ConfigError):
        load_data("demo", "test")


def test_messages_go_through_the_chat_template(tmp_path, tiny_tokenizer):
    path = write_jsonl(tmp_path / "a.jsonl", [{"messages": CHAT}])
    (text,) = load_texts(path, tokenizer=tiny_tokenizer)
    assert text == tiny_tokenizer.apply_chat_template(CHAT, tokenize=False)
    with pytest.raises(DataError, match="no chat template"):
        load_texts(path)
    mixed = write_jsonl(tmp_path / "b.jsonl", [{"prompt": "Hi", "completion": CHAT[1:]}])
    assert load_texts(mixed, tokenizer=tiny_tokenizer) == [text]


def test_windows_cut_the_joined_text(tiny_tokenizer):
    windows = token_windows(tiny_tokenizer, ["abcd", "efgh"], 4)
    assert [tiny_tokenizer.decode(row) for row in windows] == ["abcd", "\n\nef"]
    assert token_windows(tiny_tokenizer, ["abcd", "efgh"], 4, count=1).shape == (1, 4)


def test_data_shorter_than_one_sample(tiny_tokenizer):
    with pytest.raises(DataError, match="shorter than one sample; got 3 tokens; need 4"):
        token_windows(tiny_tokenizer, ["abc"], 4)


def test_samples_keep_texts_apart(tiny_tokenizer):
    samples = token_samples(tiny_tokenizer, ["abcdef", "", "gh", "i"], 4, count=2)
    assert [tiny_tokenizer.decode(sample) for sample in samples] == ["abcd", "gh"]
    with pytest.raises(DataError, match="no token"):
        token_samples(tiny_tokenizer, [""], 4)
