"""A program that has nothing to do with training and keeps the curvature rank's core busy: the control of `steps`.

What it does to a training step (caches, memory, other programs that have to move to the training process' core) is done
by any work on that core, and is not of the pipeline's making.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

BUSY = "busy"
NEXT_CORE = "PIPELINE_NEXT_CORE"


@contextmanager
def other_core(plan: Path, *, busy: bool) -> Iterator[None]:
    """Run that program meanwhile, if asked to."""
    if not busy:
        yield
        return
    with subprocess.Popen([sys.executable, __file__, str(plan)], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            if process.stdout.readline().strip() != BUSY:
                raise RuntimeError("the program for the other core did not start; run _pipeline_busy.py by itself")
            yield
        finally:
            process.kill()


def main(plan_path: str) -> None:
    """Gradients of the plan's model until killed, or until the process that started this one is gone."""
    os.sched_setaffinity(0, {int(os.environ[NEXT_CORE])})
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # examples/
    from _common import library_text
    from char_gpt import CharGPT

    plan = json.loads(Path(plan_path).read_text())
    model = CharGPT(block=plan["block"], **{key: plan[key] for key in ("width", "heads", "layers")})
    rows = library_text(block=plan["block"], limit=100_000)[: plan["batch"]]
    model(rows).backward()
    print(BUSY, flush=True)
    parent = os.getppid()
    while os.getppid() == parent:
        model(rows).backward()


if __name__ == "__main__":
    main(*sys.argv[1:])
