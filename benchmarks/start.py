"""Starting a run: from the command to its first step, and what importing early is worth.

Trains one step in two ways, in turn: as it is, where worker processes import their engines while the driver imports its
own libraries and prepares data (``warm``), and with all of them started only when the data are ready (``cold``).
``start_s`` is the time from the command to the first line of metrics, without the step itself; ``processor_s`` what all
processes took of the processor until the run's end, the step included; ``whole_s`` the time of the whole command.

    python benchmarks/start.py [--json] [--turns 3] [--config examples/grpo_sort.yaml] [OVERRIDE ...]
"""

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harness import argument_parser, in_turn, progress, report

CONFIG = Path(__file__).parents[1] / "examples" / "grpo_sort.yaml"
MAIN = "from anytron.__main__ import main; main()"
COLD = "from anytron.workers.executor.local import LocalExecutor; LocalExecutor.warm_up = lambda self, specs: None; "
LOOK_S = 0.01


def started(program, config, overrides):
    """Train one step; return seconds to its beginning, of the processor, and of the whole command."""
    before, begin = processor_s(), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder, "run", "metrics.jsonl")
        own = ["trainer.total_steps=1", f"trainer.output_dir={metrics.parent}", "tracking.progress=false"]
        command = [sys.executable, "-c", program, "train", str(config), *own, *overrides]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
            while process.poll() is None and not (metrics.exists() and metrics.stat().st_size):
                time.sleep(LOOK_S)
            first_s = time.monotonic() - begin
        whole_s = time.monotonic() - begin
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, command)
        step_s = json.loads(metrics.read_text().splitlines()[0])["time/step_s"]
    return first_s - step_s, processor_s() - before, whole_s


def processor_s():
    """Seconds of the processor that ended children of this process have taken, and theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main():
    parser = argument_parser(__doc__)
    parser.add_argument("--turns", type=int, default=3, help="how often each way is measured, after one that is not")
    parser.add_argument("--config", type=Path, default=CONFIG, help="the run")
    parser.add_argument("overrides", nargs="*", help="keys of the configuration, key=value")
    arguments = parser.parse_args()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # Python's default: modules are compiled once

    def way(program):
        progress("one step, " + ("cold" if COLD in program else "warm"))
        return started(program, arguments.config, arguments.overrides)

    found = in_turn({"warm": lambda: way(MAIN), "cold": lambda: way(COLD + MAIN)}, arguments.turns)
    columns = ("start_s", "processor_s", "whole_s")
    rows = {
        name: {column: statistics.median(turn[place] for turn in turns) for place, column in enumerate(columns)}
        for name, turns in found.items()
    }
    ratio = rows["warm"]["start_s"] / rows["cold"]["start_s"]
    report({"starts": rows, "warm_to_cold": ratio, "cores": os.cpu_count()}, as_json=arguments.json)


if __name__ == "__main__":
    main()
