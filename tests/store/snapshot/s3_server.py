"""An S3 server on a free port of loopback, which prints its address. POST /octavo-faults: what goes wrong."""

import io
import json
import logging
import threading

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

LOCK = threading.Lock()
FAULTS = {"busy": 0, "corrupt": 0}


class Faulty:
    def __init__(self, inner):
        self.inner = inner

    def __call__(self, environ, start_response):
        if environ["PATH_INFO"] == "/octavo-faults":
            return self.settings(environ, start_response)
        if self.happens("busy"):
            start_response("503 Slow Down", [("Content-Type", "application/xml")])
            return [b"<Error><Code>SlowDown</Code><Message>later</Message></Error>"]
        is_data = environ["REQUEST_METHOD"] == "PUT" and environ["PATH_INFO"].endswith(".safetensors")
        if is_data and self.happens("corrupt"):
            body = bytearray(environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"])))
            body[len(body) // 2] ^= 1
            environ["wsgi.input"] = io.BytesIO(bytes(body))
        return self.inner(environ, start_response)

    def settings(self, environ, start_response):
        wanted = json.loads(environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"])))
        with LOCK:
            left = dict(FAULTS)
            FAULTS.update({name: wanted.get(name, 0) for name in FAULTS})
        start_response("200 OK", [("Content-Type", "application/json")])
        return [json.dumps(left).encode()]

    def happens(self, name):
        with LOCK:
            happens = FAULTS[name] > 0
            FAULTS[name] -= happens
            return happens


if __name__ == "__main__":
    logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
    server = make_server("127.0.0.1", 0, Faulty(DomainDispatcherApplication(create_backend_app)), threaded=True)
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()
