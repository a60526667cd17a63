"""One family, one number of ranks: an engine started from A is recorded, one from B is updated to A and back.

Each part runs in a process of its own and writes what it saw as JSON; the tests compare. That process is
forked from one that has imported SGLang already, and its schedulers are forked from it in turn (`serve`):
importing SGLang takes 15 seconds of processor in each of six processes that a case would start.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import sys
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.engines.sglang.engine import answers, poison, probe, say, start

JOB = {"connect_timeout": 60.0, "update_timeout": 60.0, "stall": 30.0, "lease": 30.0}


def fresh(checkpoints: list[Path], ranks: int, out: Path) -> None:
    """Record a fresh engine: its answers and every live tensor."""
    from syncline.adapters.sglang import commands  # noqa: PLC0415
    from syncline.adapters.sglang.doors import EngineDoor  # noqa: PLC0415

    engine = start(checkpoints[0], ranks)
    reply = commands.decode_reply(
        EngineDoor(engine).command(commands.encode(commands.Dump(str(out / "fresh-a"))), 60.0)
    )
    if reply.error is not None:
        raise RuntimeError(reply.error)
    _write(out / "fresh-a.json", {"answers": answers(engine)})
    say("fresh: recorded")
    engine.shutdown()


def updated(made: list[Path], ranks: int, out: Path) -> None:
    """Start from B; poison and update to A; poison and update to B again; record all three."""
    from syncline.adapters.sglang import SGLangInstance  # noqa: PLC0415
    from syncline.options import Options  # noqa: PLC0415

    checkpoints = dict(zip("ab", made, strict=True))
    engine = start(checkpoints["b"], ranks)
    say("updated: started")
    with Writer(checkpoints["a"], Options(**JOB)) as writer:
        instance = SGLangInstance(engine, instance="sglang", job="scene", options=Options(**JOB))
        say(f"updated: joined; {instance.facts}")
        live = instance.live_status()
        spoiled = sorted({name for rank in live for name, one in rank.items() if one.status != "local"})
        instance.dump(out / "fresh-b")
        seen: dict[str, Any] = {"fresh": {"answers": answers(engine)}, "spoiled": spoiled}
        seen["facts"] = instance.facts
        seen["status"] = [{name: [one.status, list(one.names)] for name, one in r.items()} for r in live]
        for number, version in enumerate(("a", "b"), start=1):
            writer.load(checkpoints[version])
            writer.publish(number)
            poison(engine, spoiled)
            report = instance.update(number)
            instance.dump(out / f"updated-{version}")
            seen[version] = {"report": report.as_dict(), "answers": answers(engine)}
            say(f"updated: to {version}, {report.nbytes} bytes in {report.seconds['total']:.2f} s")
        instance.check_effective(checkpoints["b"])
        probe(engine, out)
        seen["probe"] = [json.loads((out / f"probe-{rank}.json").read_text()) for rank in range(ranks)]
        _write(out / "updated.json", seen)
        instance.close()
    engine.shutdown()


class Writer:
    """A trainer whose parameters are the tensors of a checkpoint, under their own names.

    Args:
        checkpoint: of its first weights.
        options: deadlines.
        leave_out: a tensor that it does not have.
        job: name of the job.
    """

    def __init__(
        self, checkpoint: Path, options: Any, *, leave_out: str | None = None, job: str = "scene"
    ) -> None:
        from syncline.store.writer import WeightWriter  # noqa: PLC0415
        from tests.engines.checkpoints import tensors  # noqa: PLC0415
        from tests.store.pair import Trainer, module  # noqa: PLC0415

        held = {name: tensor.clone() for name, tensor in tensors(checkpoint).items() if name != leave_out}
        self._model = module(held)
        self._writer = WeightWriter(Trainer(self._model), job=job, options=options)

    def load(self, checkpoint: Path) -> None:
        """Take a step: the parameters become those of another checkpoint, in place."""
        import torch  # noqa: PLC0415

        from tests.engines.checkpoints import tensors  # noqa: PLC0415

        self._writer.close_window("a step")
        with torch.no_grad():
            mine = dict(self._model.named_parameters())
            for name, tensor in tensors(checkpoint).items():
                mine[name].copy_(tensor)

    def publish(self, number: int) -> None:
        """Open a read window on the parameters as they are."""
        self._writer.publish(number)

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_error: object) -> None:
        self._writer.close()


def _write(path: Path, what: object) -> None:
    path.write_text(json.dumps(what))


PARTS = {"fresh": fresh, "updated": updated}


def _play(case: dict[str, Any]) -> None:
    """Play a part in this process, a fork of the one that serves."""
    os.setsid()
    log = os.open(case["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(case["environ"])
    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = lambda *_args, **_more: None  # SGLang would import itself anew
    PARTS[case["part"]]([Path(one) for one in case["checkpoints"]], case["ranks"], Path(case["out"]))


def _child(case: dict[str, Any]) -> int:
    """Fork a process that plays a part and ends with 0 if nothing went wrong; return its id."""
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        _play(case)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def serve() -> None:
    """Play the parts that come, one a line; answer each with its process, and again when that has ended."""
    for name in ("sglang", "sglang.srt.managers.scheduler", "sglang.srt.managers.detokenizer_manager"):
        import_module(name)
    for line in sys.stdin:
        child = _child(json.loads(line))
        say(str(child))
        _, status = os.waitpid(child, 0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # what it left behind
        say(str(os.waitstatus_to_exitcode(status)))


if __name__ == "__main__":
    serve()
