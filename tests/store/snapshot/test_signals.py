"""Being asked to stop: signals, the second one, and the notice of a metadata service that speaks IMDSv2."""

import os
import signal
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from octavo.store.snapshot.signals import StopRequest, spot_notice


class Metadata(BaseHTTPRequestHandler):
    """401 without a token of its own; 404 until `notice` is set."""

    notice = None

    def do_PUT(self):
        self.answer(200, b"token") if self.path == "/latest/api/token" else self.answer(404, b"")

    def do_GET(self):
        if self.headers.get("X-aws-ec2-metadata-token") != "token":
            self.answer(401, b"")
        elif self.path != "/latest/meta-data/spot/instance-action" or Metadata.notice is None:
            self.answer(404, b"")
        else:
            self.answer(200, Metadata.notice)

    def answer(self, code, body):
        self.send_response(code)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        return


@pytest.fixture
def service():
    server = HTTPServer(("127.0.0.1", 0), Metadata)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    Metadata.notice = None
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda n: n.name)
def test_the_first_signal_asks_the_second_acts(number):
    heard = []
    before = signal.signal(number, lambda *_: heard.append(number))
    try:
        stop = StopRequest()
        os.kill(os.getpid(), number)
        assert stop.reason == number.name and heard == []
        os.kill(os.getpid(), number)
        assert heard == [number]
        stop.close()
        os.kill(os.getpid(), number)
        assert heard == [number, number]
    finally:
        signal.signal(number, before)


def test_a_spot_notice_asks(service):
    assert spot_notice(service) is None
    stop = StopRequest(service, every=0.01)
    try:
        assert stop.reason is None
        Metadata.notice = b'{"action": "terminate", "time": "2026-01-01T00:00:00Z"}'
        until = time.monotonic() + 60
        while stop.reason is None and time.monotonic() < until:
            time.sleep(0.01)
        assert "terminate" in stop.reason
    finally:
        stop.close()


def test_no_service_is_no_notice(service):
    assert spot_notice("http://127.0.0.1:9") is None


def test_in_another_thread_only_asking_works():
    made = []
    thread = threading.Thread(target=lambda: made.append(StopRequest()))
    thread.start()
    thread.join()
    made[0].ask("because")
    made[0].ask("later")
    assert made[0].reason == "because"
    made[0].close()
