"""Count the files that a training step enters from row to loss: ``python -m tests.walk [KEY=VALUE ...]``.

A profiler runs in each process of two steps of ``examples/grpo_sort.yaml``. A function counts while the step draws
prompts, has them answered and rewarded, makes batches of them, and computes the loss; backward passes, optimizer,
transfer of weights, checkpoints and metrics do not. Keys change the run.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
BETWEEN = {
    ("core/anytron/run/trainer/experience.py", "make"),
    ("core/anytron/run/trainer/loop.py", "score"),
    ("core/anytron/run/trainer/updates.py", "mini_batches"),
    ("core/anytron/run/trainer/non_finite.py", "update"),
    ("backends/anytron_rollout/transformers_engine.py", "submit"),
    ("backends/anytron_rollout/transformers_engine.py", "poll"),
    ("backends/anytron_megatron/training/schedule.py", "forward_step"),
    ("backends/anytron_megatron/training/schedule.py", "loss_step"),
}
"""Functions between whose call and return everything counts."""
PARTS = {
    "inside of the model": ("/kernels/", "/portable_te/", "/patches/", "/redirect/", "/anytron_cpu/"),
    "between processes": ("/workers/executor/", "/task/isolation/"),
    "records": ("/record/",),
}
WALK = "from row to loss"
SITE = f"import sys\nsys.path.append({str(ROOT)!r})\nfrom tests.walk import watch\nwatch()\n"


def watch() -> None:
    """Note the files that this process enters on the walk, and write them down at its end."""
    entered, inside = set(), 0
    packages = tuple(str(ROOT / part) for part in ("core", "backends", "plugins"))

    def profile(frame, event, _) -> None:
        nonlocal inside
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(packages) or code.co_name == "<module>":
            return
        file = code.co_filename[len(str(ROOT)) + 1 :]
        step = (file, code.co_name) in BETWEEN
        inside += step if event == "call" else -step
        if inside:
            entered.add(file)

    def write() -> None:
        sys.setprofile(None)
        Path(os.environ["WALK"], f"{os.getpid()}.json").write_text(json.dumps(sorted(entered)), encoding="utf-8")

    def leave(code: int) -> None:
        write()
        exit_now(code)

    exit_now, os._exit = os._exit, leave  # workers leave so, and run nothing of atexit
    atexit.register(write)
    sys.setprofile(profile)


def walk(*overrides: str) -> dict[str, list[str]]:
    """Train two steps; return the files by part of the walk."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "sitecustomize.py").write_text(SITE, encoding="utf-8")
        small = ["trainer.total_steps=2", "data.prompts_per_step=4", "rollout.samples_per_prompt=4"]
        command = [
            "anytron",
            "train",
            "examples/grpo_sort.yaml",
            f"trainer.output_dir={folder}/run",
            *small,
            *overrides,
        ]
        environment = {**os.environ, "WALK": folder, "PYTHONPATH": folder}
        subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL, timeout=300)
        files = {file for path in Path(folder).glob("*.json") for file in json.loads(path.read_text(encoding="utf-8"))}
    found = {
        name: sorted(file for file in files if any(part in file for part in parts)) for name, parts in PARTS.items()
    }
    return {WALK: sorted(files.difference(*found.values()))} | found


if __name__ == "__main__":
    for name, entered in walk(*sys.argv[1:]).items():
        print(f"{len(entered):3} {name}", *entered, sep="\n      ")
