"""One family, one number of ranks: an engine started from A is recorded, one from B is updated to A and back.

python -m tests.engines.sglang.scene fresh|updated RANKS DIRECTORY CHECKPOINT... (under `engine.environment`)

Each part runs in a process of its own and writes what it saw as JSON; the tests compare.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.engines.sglang.engine import answers, poison, probe, say, start

JOB = {"connect_timeout": 60.0, "update_timeout": 60.0, "stall": 30.0, "lease": 30.0}


def fresh(checkpoint: Path, ranks: int, out: Path) -> None:
    """Record a fresh engine: its answers and every live tensor."""
    from syncline.adapters.sglang import commands  # noqa: PLC0415
    from syncline.adapters.sglang.doors import EngineDoor  # noqa: PLC0415

    engine = start(checkpoint, ranks)
    reply = commands.decode_reply(
        EngineDoor(engine).command(commands.encode(commands.Dump(str(out / "fresh-a"))), 60.0)
    )
    if reply.error is not None:
        raise RuntimeError(reply.error)
    _write(out / "fresh-a.json", {"answers": answers(engine)})
    say("fresh: recorded")
    engine.shutdown()


def updated(checkpoints: dict[str, Path], ranks: int, out: Path) -> None:
    """Start from B; poison and update to A; poison and update to B again; record all three."""
    from syncline.adapters.sglang import SGLangInstance  # noqa: PLC0415
    from syncline.options import Options  # noqa: PLC0415

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


def main() -> None:
    part, ranks, out, *directories = sys.argv[1:]
    paths = [Path(directory) for directory in directories]
    if part == "fresh":
        fresh(paths[0], int(ranks), Path(out))
    else:
        updated({"a": paths[0], "b": paths[1]}, int(ranks), Path(out))


if __name__ == "__main__":
    main()
