from types import SimpleNamespace

import pytest
from huggingface_hub import errors

from octavo.base.errors import CheckpointError, ConfigError, RefusedError
from octavo.integrations.hub import hub_errors, load_tokenizer, push, resolve_model


def http(kind, status):
    return kind("text of the hub", response=SimpleNamespace(status_code=status, headers={}, request=None))


def test_a_folder_is_itself(tmp_path):
    assert resolve_model(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("name", ["/no/such/folder", "./none", "a/b/c", "", "~nobody/x y"])
def test_missing_folder(name):
    with pytest.raises(CheckpointError, match="does not exist") as caught:
        resolve_model(name)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("name", ["octavo-no-such/model", "no-such-folder"])
def test_unknown_hub_id_offline(name):
    with pytest.raises(CheckpointError, match="neither a folder here nor in the hub's cache"):
        resolve_model(name)


def test_a_file_is_no_model(tmp_path):
    (tmp_path / "x").write_text("")
    with pytest.raises(CheckpointError, match="need a folder"):
        resolve_model(tmp_path / "x")


@pytest.mark.parametrize(
    ("error", "ours", "text"),
    [
        (
            http(errors.GatedRepoError, 403),
            RefusedError,
            r"gated.*Accept the licence at https://huggingface.co/a/b.*HF_TOKEN",
        ),
        (http(errors.RepositoryNotFoundError, 401), CheckpointError, "private, set HF_TOKEN"),
        (http(errors.RevisionNotFoundError, 404), CheckpointError, "no such revision"),
        (http(errors.HfHubHTTPError, 403), RefusedError, "HTTP 403.*HF_TOKEN"),
        (http(errors.HfHubHTTPError, 500), CheckpointError, "text of the hub"),
        (errors.OfflineModeIsEnabled("x"), CheckpointError, "HF_HUB_OFFLINE"),
        (errors.HfHubHTTPError.__bases__[0]("x"), CheckpointError, "cannot be reached"),
    ],
    ids=["gated", "missing", "revision", "403", "500", "offline", "network"],
)
def test_refusals_of_the_hub_say_what_to_do(error, ours, text):
    with pytest.raises(ours, match=text), hub_errors("a/b"):
        raise error


def test_writing_without_the_right_token():
    with (
        pytest.raises(RefusedError, match=r"refuses to write to a/b.*HF_TOKEN.*write access"),
        hub_errors("a/b", writing=True),
    ):
        raise http(errors.HfHubHTTPError, 403)


def test_foreign_errors_pass_through():
    with pytest.raises(ZeroDivisionError), hub_errors("a/b"):
        raise ZeroDivisionError


def test_push_checks_before_it_talks(tmp_path):
    with pytest.raises(CheckpointError, match=r"neither config\.json"):
        push(tmp_path, "a/b")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="owner/name"):
        push(tmp_path, "b")
    with pytest.raises(CheckpointError, match="cannot be reached"):
        push(tmp_path, "a/b")


def test_tokenizer_of_a_folder(tiny_llama, tmp_path):
    assert load_tokenizer(tiny_llama).pad_token == "<|pad|>"
    with pytest.raises(CheckpointError, match="no tokenizer that loads"):
        load_tokenizer(tmp_path)
