"""Object storage: a real S3 server on loopback that fails as it is told, and fsspec's memory for the protocol."""

import json
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from octavo.base.errors import CheckpointError, RefusedError, UnsupportedError
from octavo.store.snapshot.files import Files
from octavo.store.snapshot.folder import Keep, SnapshotFolder
from octavo.store.snapshot.manifest import SnapshotManifest
from octavo.store.snapshot.remote import RemoteStore
from tests.store.snapshot.conftest import make_state, train
from tests.store.snapshot.lives import fork_worker
from tests.store.snapshot.test_protocol import save

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def server():
    """Address of an S3 server in a process of its own."""
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", str(Path(__file__).with_name("s3_server.py"))],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    address = process.stdout.readline().strip()
    yield address
    process.kill()
    process.wait()
    process.stdout.close()


@pytest.fixture
def bucket(server, request):
    """(url, options) of an empty place; `faults` says what goes wrong there from now on."""
    name = "".join(c if c.isalnum() else "-" for c in request.node.name.lower())[:50].strip("-")
    options = {"key": "k", "secret": "s", "client_kwargs": {"endpoint_url": server, "region_name": "us-east-1"}}
    faults(server)
    store = RemoteStore(f"s3://{name}/run", options, first_wait=0.01)
    store.fs.call_s3("create_bucket", Bucket=name)
    return f"s3://{name}/run", options


def faults(server, **what):
    """busy: requests that get 503. corrupt: uploads that are stored with a byte changed. Returns what was left."""
    request = urllib.request.Request(f"{server}/octavo-faults", data=json.dumps(what).encode(), method="POST")
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as answer:
        return json.loads(answer.read())


def store_at(bucket):
    return RemoteStore(bucket[0], bucket[1], first_wait=0.01)


def test_round_trip_and_the_manifest_comes_last(bucket, tmp_path):
    save(tmp_path / "a", 1)
    save(tmp_path / "a", 2)
    store = store_at(bucket)
    for step in (1, 2):
        store.upload(tmp_path / "a" / f"step-{step}")
    store.upload(tmp_path / "a" / "step-2")  # there already: nothing to do
    assert store.steps() == [1, 2]
    here = SnapshotFolder(tmp_path / "b")
    store.fetch(2, here, "life")
    assert here.problem(2) is None and here.steps() == [2]
    store.fs.rm(f"{store.root}/step-2/manifest.json")
    assert store.steps() == [1]


@pytest.mark.parametrize("what", [{"busy": 3}, {"corrupt": 1}], ids=["503", "wrong-bytes"])
def test_faults_are_tried_again(server, bucket, tmp_path, what):
    save(tmp_path, 1)
    store = store_at(bucket)
    faults(server, **what)
    store.upload(tmp_path / "step-1")
    assert not any(faults(server).values()), "the fault never happened"
    store.fetch(1, SnapshotFolder(tmp_path / "back"), "life")


def test_bytes_that_stay_wrong_never_get_a_manifest(server, bucket, tmp_path):
    save(tmp_path, 1)
    store = store_at(bucket)
    faults(server, corrupt=1000)
    with pytest.raises(OSError, match=r"other bytes than were sent|checksum"):
        store.upload(tmp_path / "step-1")
    faults(server)
    assert store.steps() == []


def test_an_upload_killed_between_parts_is_ignored_and_cleaned(bucket, tmp_path):
    """A multipart upload whose process is gone: no object, no manifest; the next writer ends it."""
    save(tmp_path, 1)
    store = store_at(bucket)
    name, _, prefix = store.root.partition("/")
    begun = store.fs.call_s3("create_multipart_upload", Bucket=name, Key=f"{prefix}/step-1/x/model.safetensors")
    part = {"Bucket": name, "Key": begun["Key"], "UploadId": begun["UploadId"], "PartNumber": 1, "Body": b"x" * 100}
    store.fs.call_s3("upload_part", **part)
    other = store.fs.call_s3("create_multipart_upload", Bucket=name, Key="another/run")
    assert store.steps() == []
    store.abort_unfinished()
    left = store.fs.call_s3("list_multipart_uploads", Bucket=name)["Uploads"]
    assert [upload["UploadId"] for upload in left] == [other["UploadId"]]
    store.upload(tmp_path / "step-1")
    assert store.steps() == [1]


def test_two_runs_at_one_place(bucket, tmp_path):
    """If-None-Match lets one win; the other's data never mixes with it."""
    for run in ("mine", "theirs"):
        save(tmp_path / run, 1, run=run)
    store = store_at(bucket)
    store.upload(tmp_path / "mine" / "step-1")
    with pytest.raises(RefusedError, match="a snapshot of another run"):
        store.upload(tmp_path / "theirs" / "step-1")
    store._is_free = lambda step, sealed, real=store._is_free: True  # both looked before either wrote
    with pytest.raises(FileExistsError):
        store.fs.pipe_file(store._manifest_path(1), b"x", mode="create")
    store.fetch(1, SnapshotFolder(tmp_path / "back"), "life")
    assert SnapshotFolder(tmp_path / "back").problem(1) is None


def test_a_training_whose_machine_is_gone_goes_on_elsewhere(new, bucket, tmp_path):
    remote = {"remote": bucket[0], "remote_options": bucket[1], "keep_last": 2}
    snapshots, state = new(**remote), make_state()
    losses = train(state, snapshots, snapshots.start(state), 5)
    snapshots.close()
    assert snapshots.writer.uploaded == 4
    shutil.rmtree(tmp_path / "snapshots")
    store = store_at(bucket)
    again, state = new(**remote), make_state()
    begin = again.start(state)
    assert begin == store.steps()[-1] == 4
    resumed = train(state, again, begin, 7)
    assert resumed[5] == losses[5]
    again.close()
    assert store.steps()[-1] == 6 and len(store.steps()) <= 2


def test_pruning_is_of_this_run_alone(tmp_path):
    store = RemoteStore(f"memory://{tmp_path.name}/run")
    for step, run in ((1, "theirs"), (2, "mine"), (3, "mine"), (4, "mine"), (5, "mine")):
        save(tmp_path, step, run=run)
        store.upload(tmp_path / f"step-{step}")
    store.prune("mine", Keep(last=1, every=4), best=2)
    assert store.steps() == [1, 2, 4, 5]


def test_broken_objects_are_found(tmp_path):
    store = RemoteStore(f"memory://{tmp_path.name}/run")
    save(tmp_path, 1)
    store.upload(tmp_path / "step-1")
    path = store.fs.glob(f"{store.root}/step-1/*/model.safetensors")[0]
    data = bytearray(store.fs.cat_file(path))
    data[99] ^= 4
    store.fs.pipe_file(path, bytes(data))
    with pytest.raises(CheckpointError, match="other bytes"):
        store.fetch(1, SnapshotFolder(tmp_path / "back"), "life")
    assert list((tmp_path / "back").iterdir()) == []
    store.fs.pipe_file(f"{store.root}/step-1/manifest.json", b"{")
    with pytest.raises(CheckpointError, match="no manifest"):
        store.manifest(1)


def test_a_protocol_nobody_knows():
    with pytest.raises(UnsupportedError, match="octavo\\[cloud\\]"):
        RemoteStore("nosuch://bucket")


def test_a_failed_upload_shows(new, tmp_path, monkeypatch):
    monkeypatch.setattr("octavo.store.snapshot.remote.FIRST_WAIT", 0.0)
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where a folder should be")
    snapshots = new(start=fork_worker(Files()), remote=f"file://{blocked}/run")
    state = make_state()
    snapshots.find("never")
    train(state, snapshots, snapshots.start(state), 2)
    started = time.monotonic()
    with pytest.raises(RefusedError, match="upload to file://"):
        snapshots.close()
    assert time.monotonic() - started < 60 and SnapshotFolder(snapshots.path).steps() == [2]


@pytest.mark.parametrize("outside", ["../../victim", "{tmp}/victim", "a/b", "..", "manifest.json"])
def test_a_manifest_writes_nothing_outside_its_folder(tmp_path, outside):
    """The seal is a plain hash: whoever can write to the bucket can write one."""
    victim = tmp_path / "victim"
    victim.write_text("mine")
    save(tmp_path / "a", 1)
    name = outside.format(tmp=tmp_path)
    source = SnapshotFolder(tmp_path / "a").at(1)
    manifest = SnapshotManifest.read(source)
    record = next(iter(manifest.files.values()))
    forged = manifest.model_copy(update={"files": {name: record}})
    store = RemoteStore(f"memory://{tmp_path.name}/forged")
    store.upload(source)
    store.fs.pipe_file(f"{store.root}/step-1/manifest.json", forged.sealed())
    with pytest.raises(CheckpointError, match="no name of a file"):
        store.fetch(1, SnapshotFolder(tmp_path / "back"), "life")
    assert victim.read_text() == "mine"


@pytest.mark.parametrize("run", ["*", "x/../../other", "", "a b", ["run"]])
def test_a_run_that_is_no_name_owns_nothing(tmp_path, run):
    """The name of a run is part of what is deleted."""
    folder = SnapshotFolder(tmp_path)
    (tmp_path / "run.json").write_text(json.dumps({"run": run}))
    assert folder.owner() is None


def test_a_link_in_place_of_a_snapshot_goes_without_what_it_points_to(tmp_path):
    save(tmp_path / "elsewhere", 1)
    for step in (2, 3):
        save(tmp_path / "here", step)
    (tmp_path / "here" / "step-1").symlink_to(SnapshotFolder(tmp_path / "elsewhere").at(1))
    (tmp_path / "here" / "best.json").write_text(json.dumps({"step": [1], "value": 0.0}))
    assert SnapshotFolder(tmp_path / "here").prune("run", Keep(last=1)) == [1, 2]
    assert SnapshotFolder(tmp_path / "elsewhere").problem(1) is None
