"""A running OpenAI server takes three versions while clients stream: nothing fails or mixes (B83-B87)."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest

from syncline.adapters.vllm import VLLMInstance
from syncline.errors import DeadlineError, SynclineError
from tests.engines import checkpoints
from tests.engines.vllm.running import ROOT, environment, needs_vllm

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800), needs_vllm]

START = 600.0


class Server:
    """A vLLM OpenAI server of its own process."""

    def __init__(self, directory: Path, log: Path, *options: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        command = [sys.executable, "-W", "ignore", "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", str(directory), "--served-model-name", "m", "--host", "127.0.0.1"]
        command += [
            "--port",
            str(self.port),
            "--dtype",
            "float32",
            "--enforce-eager",
            "--max-model-len",
            "128",
        ]
        command += ["--max-num-seqs", "4", "--enable-scale-out", *options]
        self._log = log.open("w")
        environ = environment(1, log.parent / "run") | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=environ, stdout=self._log, stderr=subprocess.STDOUT
        )
        try:
            self._await(log)
        except BaseException:
            self.close()
            raise

    def _await(self, log: Path) -> None:
        until = time.monotonic() + START
        while not self._up():
            assert self.process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < until, "the server did not come up"
            time.sleep(0.5)

    def _up(self) -> bool:
        try:
            return urllib.request.urlopen(f"{self.url}/health", timeout=2).status == 200  # noqa: S310 (ours)
        except OSError:
            return False

    def post(self, path: str, body: dict[str, Any], timeout: float = 60.0) -> Any:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)  # noqa: S310 (ours)
        return urllib.request.urlopen(request, timeout=timeout)  # noqa: S310 (ours)

    def complete(self, prompt: str, tokens: int = 12) -> dict[str, Any]:
        wanted = {"model": "m", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        with self.post("/v1/completions", wanted | {"return_token_ids": True, "logprobs": 2}) as reply:
            return json.load(reply)["choices"][0]

    def stream(self, tokens: list[int], count: int) -> tuple[int, str, list[str]]:
        """Stream an answer; return how many tokens came, why it ended, and the versions that sampled them."""
        wanted = {"max_tokens": count, "temperature": 0, "ignore_eos": True}
        body = {"model": "m", "token_ids": tokens, "sampling_params": wanted, "stream": True}
        got, reason, versions = 0, "", []
        with self.post("/inference/v1/generate", body) as reply:
            for line in reply:
                if not line.startswith(b"data: {"):
                    continue
                for choice in json.loads(line[6:])["choices"]:
                    got += len(choice["token_ids"] or ())
                    reason = choice["finish_reason"] or reason
                    versions += [span["version"] for span in choice["weight_versions"] or ()]
        return got, reason, versions

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(30)
        self._log.close()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    out = tmp_path_factory.mktemp("server")
    return [checkpoints.make("qwen3", out / name, seed) for seed, name in enumerate(("old", "a", "b", "c"))]


@pytest.fixture(scope="module")
def fresh(made: list[Path], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    server = Server(made[3], tmp_path_factory.mktemp("fresh") / "log")
    try:
        return [server.complete(prompt) for prompt in checkpoints.PROMPTS]
    finally:
        server.close()


@pytest.fixture
def server(made: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("SYNCLINE_RUN_DIR", str(tmp_path / "run"))
    started = Server(made[0], tmp_path / "log", "--weight-transfer-config", '{"backend": "syncline"}')
    yield started
    started.close()


def test_three_versions_while_a_client_streams(
    server: Server, made: list[Path], fresh: list[dict[str, Any]]
) -> None:
    from tests.engines.vllm.scene import JOB, OPTIONS, Trainer  # noqa: PLC0415 (torch only where vLLM is)

    trainer = Trainer(str(made[1]))
    instance = VLLMInstance(server.url, job=JOB, options=OPTIONS, pause="keep")
    before = instance._door.version(10.0)
    published: list[str] = []
    ended: list[tuple[int, str, list[str]]] = []
    failed: list[BaseException] = []
    stop = threading.Event()

    def client(tokens: list[int]) -> None:
        while not stop.is_set():
            try:
                ended.append(server.stream(tokens, 90))
            except BaseException as error:
                failed.append(error)
                return

    clients = [threading.Thread(target=client, args=([number, 40, 50],)) for number in (10, 20)]
    for thread in clients:
        thread.start()
    try:
        for number, directory in enumerate(made[1:], 1):
            trainer.publish(number, str(directory))
            report = instance.update(number)
            assert report.changed
            published.append(str(report.key))
            assert instance._door.version(10.0) == str(report.key) == str(instance.committed)
            time.sleep(0.5)
        told = [server.complete(prompt) for prompt in checkpoints.PROMPTS]
    finally:
        stop.set()
        for thread in clients:
            thread.join(60)
    assert failed == []
    assert ended
    assert {(got, reason) for got, reason, _ in ended} == {(90, "length")}
    order = [before, *published]
    for _, _, versions in ended:  # each token carries one published version, and a stream never goes back
        assert versions
        assert versions == sorted(versions, key=order.index)
    assert published[-1] in {version for _, _, versions in ended for version in versions}
    for expected, found in zip(fresh, told, strict=True):
        assert found["token_ids"] == expected["token_ids"]
        assert found["logprobs"] == expected["logprobs"]
    instance.check_effective(made[3])

    # an error crosses HTTP whole; a request that does not end under "wait" is an error with a deadline
    with pytest.raises(SynclineError) as stale:
        instance.update(1, timeout=5)
    assert type(stale.value).__name__ == "StaleVersionError"
    waiting = VLLMInstance(server.url, job=JOB, options=OPTIONS, pause="wait")
    trainer.publish(4, str(made[1]))
    long = threading.Thread(target=server.stream, args=([60, 61], 110))
    long.start()
    time.sleep(0.2)
    with pytest.raises(DeadlineError, match="still processes requests"):
        waiting.update(4, timeout=0.2)
    long.join(60)
    waiting.update(4)
    assert waiting.committed is not None
    assert waiting.committed.number == 4
    waiting.close()
    trainer.writer.close()
