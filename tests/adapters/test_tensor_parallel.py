"""Instances of several processes: rank 0 leads, updates lie between forward passes."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import socket
from pathlib import Path

import pytest

from syncline.adapters.huggingface import HuggingFaceEngine
from syncline.cli.model import PACKAGE, prepare
from tests.adapters import tensor_parallel_rank
from tests.adapters.helpers import save_tiny


def _port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _instance(world, *arguments, timeout=100):
    """Run an instance from a fork server that has imported torch and Transformers once."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([tensor_parallel_rank.__name__])
    queue, port = context.Queue(), _port()
    ranks = [
        context.Process(target=tensor_parallel_rank.rank_main, args=(queue, r, world, port, *arguments))
        for r in range(world)
    ]
    for process in ranks:
        process.start()
    try:
        reports = []
        for _ in ranks:
            reports.append(queue.get(timeout=timeout))
            assert "failed" not in reports[-1], reports[-1]["failed"]
    finally:
        for process in ranks:
            process.join(10)
            process.kill()
            process.join()
    return sorted(reports, key=lambda report: report["rank"])


def _texts(directory, prompts, tokens):
    return [c.text for c in HuggingFaceEngine.load(directory).generate(prompts, tokens)]


def _check(reports, old_texts, new_texts):
    lead = reports[0]
    assert lead["before"] == old_texts
    assert lead["after"] == new_texts != old_texts
    assert lead["version"] == "1.2"
    assert [r["rank"] for r in reports] == list(range(len(reports)))
    for report in reports:
        assert report["differ"] == []
        assert report.get("followed", True)


@pytest.mark.timeout(150)
@pytest.mark.parametrize(("family", "way"), [("qwen3_moe", "auto"), ("qwen3_tied", "parallelize")])
def test_two_processes_are_one_instance(family, way, tmp_path):
    old, new = save_tiny(family, tmp_path / "old", seed=1), save_tiny(family, tmp_path / "new", seed=2)
    prompts = ["w5 w6 w7", "w9 w10 w11 w12"]
    reports = _instance(2, old, new, way, prompts, 8)
    _check(reports, _texts(old, prompts, 8), _texts(new, prompts, 8))
    assert reports[0]["aborted"] in (["aborted"], ["aborted", "stop"], ["stop"])
    assert reports[0]["aliases"] == (
        {"lm_head.weight": "model.embed_tokens.weight"} if "tied" in family else {}
    )


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_real_weights_over_three_processes(tmp_path):
    if importlib.util.find_spec(PACKAGE) is None:
        pytest.skip(f"{PACKAGE} is not installed")
    cache = Path(os.environ.get("SYNCLINE_TEST_MODELS", tmp_path))
    directory = prepare(cache)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    reports = _instance(3, directory, directory, "auto", [chat], 24, timeout=200)
    assert reports[0]["before"] == reports[0]["after"] == _texts(directory, [chat], 24)
    assert "Paris" in reports[0]["after"][0]
    for report in reports:
        assert report["differ"] == []
        assert report["kinds"] == ["DTensor", "Parameter"]
