"""The output appears whole or not at all; what travels with the weights never leads outside of the model."""

import errno
import os

import pytest

from octavo.base.errors import CheckpointError, InputError
from octavo.store import folder as folders
from octavo.store.folder import OutputFolder, check_space, copy_side_files, output_error


def unfinished(target):
    return target.parent / f".{target.name}.octavo-unfinished"


def test_commit_shows_the_folder(tmp_path):
    target = tmp_path / "out"
    with OutputFolder(target, "job") as out:
        (out.path / "x").write_text("1")
        assert not target.exists()
        out.commit()
    assert [p.name for p in target.iterdir()] == ["x"]
    assert not unfinished(target).exists()


@pytest.mark.parametrize("error", [InputError("bad"), OSError(errno.EIO, "I/O error")], ids=["ours", "os"])
def test_errors_leave_nothing(tmp_path, error):
    target = tmp_path / "new" / "out"
    with pytest.raises(InputError), OutputFolder(target, "job") as out:
        (out.path / "x").write_text("1")
        raise error
    assert os.listdir(tmp_path) == []


def test_interrupted_work_stays_for_the_same_job_only(tmp_path):
    target = tmp_path / "out"

    def interrupted(job):
        with pytest.raises(KeyboardInterrupt), OutputFolder(target, job) as out:
            found = (out.path / "x").exists()
            (out.path / "x").write_text("1")
            (out.path / "sub").mkdir(exist_ok=True)
            raise KeyboardInterrupt
        return found

    assert not interrupted("a")
    assert interrupted("a")
    assert not interrupted("b")
    assert not interrupted(None)
    assert not interrupted(None)
    assert not target.exists()


def test_two_processes_keep_apart(tmp_path):
    target = tmp_path / "out"
    with OutputFolder(target, "job") as out:
        with pytest.raises(InputError, match="another process"), OutputFolder(target, "job"):
            pass
        assert out.path.exists()
        out.commit()


@pytest.mark.parametrize("kind", ["file", "link", "full"])
def test_taken_names(tmp_path, kind):
    target = tmp_path / "out"
    if kind == "file":
        target.write_text("mine")
    elif kind == "link":
        target.symlink_to(tmp_path / "elsewhere")
    else:
        target.mkdir()
        (target / "mine").write_text("mine")
    with pytest.raises(InputError, match="output"), OutputFolder(target, "job"):
        pass
    assert os.listdir(tmp_path) == ["out"]


def test_folder_that_cannot_be_replaced_is_filled_from_inside(tmp_path, monkeypatch):
    """A mount point: config.json comes last."""
    target = tmp_path / "out"
    target.mkdir()
    monkeypatch.setattr(folders.os.path, "ismount", lambda path: True)
    with OutputFolder(target, "job") as out:
        assert out.path.parent == target
        for name in ("config.json", "a", "z"):
            (out.path / name).write_text("1")
        out.commit()
    assert sorted(os.listdir(target)) == ["a", "config.json", "z"]


def test_unwritable_place(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match="output"), OutputFolder(tmp_path / "file" / "out", "job"):
        pass


def test_disk_full_in_words(tmp_path):
    assert "disk is full" in str(output_error(tmp_path, OSError(errno.ENOSPC, "x")))
    assert "Permission denied" in str(output_error(tmp_path, OSError(errno.EACCES, "Permission denied")))
    check_space(tmp_path, 1)
    with pytest.raises(InputError, match="GB free"):
        check_space(tmp_path, 10**18)


@pytest.fixture
def model(tmp_path):
    source = tmp_path / "model"
    (source / "sub").mkdir(parents=True)
    (source / ".cache").mkdir()
    for name in ("config.json", "tokenizer.json", "sub/code.py", "vocab.txt"):
        (source / name).write_text(name)
    for name in (
        "model.safetensors",
        "model.safetensors.index.json",
        "pytorch_model.bin",
        "sub/x.onnx",
        ".cache/y",
        ".z",
    ):
        (source / name).write_text(name)
    return source


def test_side_files_without_weights_and_hidden_files(tmp_path, model):
    copied, left = copy_side_files(model, tmp_path / "out")
    assert sorted(copied) == ["sub/code.py", "tokenizer.json", "vocab.txt"]
    assert left == []
    assert (tmp_path / "out" / "sub" / "code.py").read_text() == "sub/code.py"


def test_large_side_files_are_left_and_named(tmp_path, model, monkeypatch):
    monkeypatch.setattr(folders, "SIDE_FILE_LIMIT", 10)
    assert copy_side_files(model, tmp_path / "out")[1] == ["tokenizer.json", "sub/code.py"]


def test_hub_snapshot_links_are_followed(tmp_path):
    """snapshots/REV/NAME -> ../../blobs/HASH: the copy holds files, not links."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "rev"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json"):
        (blobs / f"hash-{name}").write_text(name)
        (snapshot / name).symlink_to(f"../../blobs/hash-{name}")
    copied, _ = copy_side_files(snapshot, tmp_path / "out")
    assert copied == ["tokenizer.json"]
    assert not (tmp_path / "out" / "tokenizer.json").is_symlink()
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "tokenizer.json"


@pytest.mark.parametrize("target", ["../secret", "/etc/passwd", "nowhere", "."])
def test_links_that_leave_are_refused(tmp_path, model, target):
    (tmp_path / "secret").write_text("key")
    if target == ".":
        os.mkfifo(model / "notes.txt")
    else:
        (model / "notes.txt").symlink_to(target)
    with pytest.raises(CheckpointError, match="notes"):
        copy_side_files(model, tmp_path / "out")


def test_linked_folders_are_not_entered(tmp_path, model):
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "key").write_text("secret")
    (model / "assets").symlink_to(tmp_path / "private")
    assert "assets/key" not in copy_side_files(model, tmp_path / "out")[0]


def test_never_writes_through_a_link_in_the_output(tmp_path, model):
    out = tmp_path / "out"
    out.mkdir()
    (tmp_path / "victim").write_text("precious")
    (out / "tokenizer.json").symlink_to(tmp_path / "victim")
    copy_side_files(model, out)
    assert (tmp_path / "victim").read_text() == "precious"
    assert not (out / "tokenizer.json").is_symlink()
