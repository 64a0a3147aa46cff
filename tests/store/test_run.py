"""The run folder: snapshots in order, whole folders or none, the policy, unfinished runs."""

import errno
import json

import pytest
from safetensors import SafetensorError

from octavo.base.errors import CheckpointError, ConfigError, InputError, MismatchError
from octavo.store.policy import Policy, PolicyEntry
from octavo.store.run import RunFolder, whole_folder


def test_steps_count_only_whole_snapshots(tmp_path):
    run = RunFolder(tmp_path)
    assert run.steps() == []
    for name in ("step-2", "step-10", "step-9", ".step-11.tmp", "other"):
        (run.snapshots / name).mkdir(parents=True)
    assert run.steps() == [2, 9, 10]


def test_whole_folder_appears_at_once(tmp_path):
    target = tmp_path / "adapter"
    with whole_folder(target) as work:
        (work / "a").write_text("1")
        assert not target.exists()
    assert (target / "a").read_text() == "1"
    assert [p.name for p in tmp_path.iterdir()] == ["adapter"]


def test_whole_folder_keeps_the_old_one_on_error(tmp_path):
    target = tmp_path / "adapter"
    target.mkdir()
    (target / "a").write_text("old")
    with pytest.raises(KeyboardInterrupt), whole_folder(target) as work:
        (work / "a").write_text("new")
        raise KeyboardInterrupt
    assert (target / "a").read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["adapter"]


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, "No space left on device"), SafetensorError("I/O error: No space left (os error 28)")],
    ids=["os", "safetensors"],
)
def test_full_disk_leaves_nothing(tmp_path, error):
    with pytest.raises(InputError, match="the disk is full"), whole_folder(tmp_path / "adapter") as work:
        (work / "half").write_text("x")
        raise error
    assert list(tmp_path.iterdir()) == []


def test_policy_round_trip_and_refusals(tmp_path):
    run = RunFolder(tmp_path)
    kept = PolicyEntry(precision="16bit", reason="sensitive")
    policy = Policy(modules={"a": PolicyEntry(precision="fp8", reason="recipe"), "b": kept})
    run.require_policy(policy)  # a run that has written none yet
    run.write_policy(policy)
    assert run.read_policy() == policy
    run.require_policy(policy)
    with pytest.raises(MismatchError, match="another policy: a"):
        run.require_policy(Policy(modules={"a": kept, "b": kept}))
    run.policy.write_text(json.dumps({"schema_version": 1, "modules": {"a": {"precision": "fp16"}}}))
    with pytest.raises(ConfigError, match="'fp16' is unknown"):
        run.read_policy()
    run.policy.write_text(json.dumps({"schema_version": 99, "modules": {}}))
    with pytest.raises(CheckpointError, match="schema_version"):
        run.read_policy()
    run.policy.write_text("[]")
    with pytest.raises(CheckpointError, match="not a policy"):
        run.read_policy()


def test_unfinished_run_says_what_is_missing(tmp_path):
    run = RunFolder(tmp_path / "run")
    with pytest.raises(CheckpointError, match="does not exist"):
        run.require_finished()
    run.path.mkdir()
    with pytest.raises(CheckpointError, match=r"has no config\.yaml"):
        run.require_finished()
    run.write_config({"model": "demo"})
    run.write_policy(Policy(modules={}))
    run.manifest.write_text("{}")
    run.snapshot(5).mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"up to step 5\. Continue it: octavo finetune .*config\.yaml --resume"):
        run.require_finished()
    run.adapter.mkdir()
    run.require_finished()
    assert run.read_config() == {"model": "demo"}
