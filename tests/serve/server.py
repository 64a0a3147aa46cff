"""A real `vllm serve` on 127.0.0.1, for tests."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, Self

from tests.serve.client import environment

NAME = "model"
LOCAL = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # whatever proxy the machine uses for the rest


class VllmServer:
    """with VllmServer(python, folder, log) as server: server.chat("Hello")

    Leaving the block, by whatever way, ends the server and its worker processes.
    """

    def __init__(
        self,
        python: Path,
        folder: Path,
        log: Path,
        *arguments: str,
        reference_kernels: bool = True,
        boot_timeout: float = 600,
    ) -> None:
        self.log, self.boot_timeout, self.boot_seconds = log, boot_timeout, 0.0
        self.port = _free_port()
        command = [str(python), "-m", "vllm.entrypoints.cli.main", "serve", str(folder), "--host", "127.0.0.1"]
        command += ["--port", str(self.port), "--served-model-name", NAME, "--max-model-len", "1024", "--enforce-eager"]
        command += ["--kv-cache-memory-bytes", str(2**28)]
        self.command = [*command, *arguments]
        self.environment = environment(reference_kernels)

    def __enter__(self) -> Self:
        start = time.monotonic()
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                self.command,
                env=self.environment,
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        try:
            while not self._healthy():
                assert self.process.poll() is None, f"vllm serve ended while starting:\n{self.tail()}"
                assert time.monotonic() - start < self.boot_timeout, f"vllm serve did not start:\n{self.tail()}"
                time.sleep(0.5)
        except BaseException:
            self.stop()
            raise
        self.boot_seconds = time.monotonic() - start
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Ask, wait, then end the whole group: a worker may outlive the server."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(20)
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        self.process.wait()

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]

    def complete(self, prompt: str | list[int], max_tokens: int = 1, **arguments: Any) -> dict[str, Any]:
        """The first choice of /v1/completions, greedy."""
        body = {"model": NAME, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **arguments}
        return self._post("/v1/completions", body)["choices"][0]

    def chat(self, question: str, max_tokens: int = 24) -> str:
        """The greedy answer of /v1/chat/completions to one user message."""
        messages = [{"role": "user", "content": question}]
        body = {"model": NAME, "messages": messages, "max_tokens": max_tokens, "temperature": 0}
        return self._post("/v1/chat/completions", body)["choices"][0]["message"]["content"]

    def prompt_logprobs(self, ids: list[int]) -> list[float]:
        """Of every token after the first, given those before it."""
        per_token = self.complete(ids, prompt_logprobs=0)["prompt_logprobs"][1:]
        return [at[str(token)]["logprob"] for token, at in zip(ids[1:], per_token, strict=True)]

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with LOCAL.open(request, timeout=240) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{path}: {error.code} {error.read().decode(errors='replace')[:2000]}") from None

    def _healthy(self) -> bool:
        try:
            with LOCAL.open(f"http://127.0.0.1:{self.port}/health", timeout=5):
                return True
        except OSError:
            return False


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]
