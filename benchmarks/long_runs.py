"""The records of a long run: making its report, watching it, continuing it, and the place in its data.

A run's directory has metrics of so many steps (30 numbers each) and four samples of each step, as a run writes them.
Each line is measured in a process of its own, files in the page cache. "report" and "watch" are the commands `anytron
report` and `anytron watch --once`, with the start of Python; "resume" opens the directory to continue it, which removes
the last hundredth of its steps; "last" reads the metrics of the last step, "plot" draws `plots/reward.png`. Seconds
are of a clock, and of the processor. Peak memory is of the whole process, libraries included: subtract that of the
first row.

A place in data is measured with prompts of ten tokens, from two sources with weights 1 and 3. "boundary" describes the
place, as each step does; "seek" goes there, as a resume does; "draw" takes 1024 prompts, "epoch" does so across the end
of an epoch.

    python benchmarks/long_runs.py [--json] [--steps 100 10000 100000] [--sample-bytes 8000] [--prompts 10000 1000000]
"""

import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from anytron.config.schema import RunConfig
from anytron.record.checkpoint.manifest import SourceState
from anytron.record.tracking.claim import ClaimedDirectory
from anytron.record.tracking.run_directory import RunDirectory
from anytron.task.data.columns import COLUMNS, arrays_of, encoded, frame_of
from anytron.task.data.mixture import Mixture
from anytron.task.data.prompts import TokenizedPrompt
from anytron.task.data.table import PromptTable
from harness import argument_parser, progress, report, timed

HERE = Path(__file__).parent
METRICS = 30
COMMAND = "from anytron.cli.main import run; run()"
CALL = """
import sys, time
from long_runs import configuration
from anytron.record.tracking.claim import ClaimedDirectory
from anytron.record.tracking.run_directory import RunDirectory

folder, step, call = sys.argv[1:]
config = configuration(folder)
with ClaimedDirectory(config, print) as claimed:
    began = time.perf_counter(), time.process_time()
    with RunDirectory.resume(claimed, config, int(step), []) as run:
        if call:
            began = time.perf_counter(), time.process_time()
            getattr(run, call)()
        print(time.perf_counter() - began[0], time.process_time() - began[1])
"""
PEAK = """
import atexit, sys, time
from pathlib import Path

def peak():
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    print(int(line.split()[1]) << 10, time.process_time(), file=sys.stderr)

atexit.register(peak)
"""


def configuration(folder):
    return RunConfig.model_validate(
        {
            "model": {"config": {"model_type": "qwen3"}, "tokenizer": "t"},
            "data": {"source": "jsonl"},
            "rewards": [{"function": "exact_match"}],
            "trainer": {"output_dir": str(folder), "total_steps": 1_000_000},
        }
    )


def write_run(folder, steps, sample_bytes):
    """Write the files of a run with so many steps."""
    numbers = random.Random(0)
    config = configuration(folder)
    text = "".join(numbers.choices("abcdefghij   ", k=sample_bytes // 2))
    tokens = numbers.choices(range(100_000), k=sample_bytes // 14)
    names = [
        "reward/mean",
        "reward/std",
        "time/rollout_s",
        "time/step_s",
        *(f"mine/{one}" for one in range(METRICS - 4)),
    ]

    def measured():
        return {name: numbers.random() for name in names}

    with ClaimedDirectory(config, progress) as claimed, RunDirectory.begin(claimed, config):
        pass
    with (folder / "metrics.jsonl").open("w") as metrics, (folder / "samples.jsonl").open("w") as samples:
        rest = json.dumps({"prompt": "What is it?", "response": text, "response_tokens": tokens, "finished": True})
        for step in range(1, steps + 1):
            metrics.write(json.dumps({"step": step, **measured()}) + "\n")
            for number in range(4):
                samples.write(f'{{"step": {step}, "prompt_id": "{number}", "reward": 0.5, {rest[1:]}\n')


def child(name, program, *arguments):
    """Run a program in a process of its own; return its seconds, or those that it prints, and its peak memory."""
    command = [sys.executable, "-W", "ignore", "-c", PEAK + program, *map(str, arguments)]
    seconds, done = timed(lambda: subprocess.run(command, capture_output=True, text=True, check=True, cwd=HERE))
    peak, cpu_s = done.stderr.split("\n")[-2].split()
    found = done.stdout.split("\n")[-2].split() if program == CALL else [seconds, cpu_s]
    wall_s, cpu_s = map(float, found)
    return {f"{name}_s": wall_s, f"{name}_cpu_s": cpu_s, f"{name}_peak_bytes": int(peak)}


def records(folder, steps, sample_bytes):
    """Return the figures of a run with so many steps."""
    write_run(folder, steps, sample_bytes)
    figures = {f"{name}_bytes": (folder / f"{name}.jsonl").stat().st_size for name in ("metrics", "samples")}
    page = folder / "report.html"
    figures |= child("report", COMMAND, "report", folder, "--output", page)
    figures["page_bytes"] = page.stat().st_size
    figures |= child("watch", COMMAND, "watch", folder, "--once")
    figures |= child("last", CALL, folder, steps, "last_metrics")
    figures |= child("plot", CALL, folder, steps, "plot")
    return figures | child("resume", CALL, folder, steps - steps // 100, "")


def table_of(count, first):
    """Make a source of so many prompts of ten tokens."""
    columns = {name: [] for name in COLUMNS}
    for begin in range(0, count, 256):
        numbers = range(first + begin, first + min(begin + 256, count))
        some = [TokenizedPrompt(str(one), "text", tuple(range(one, one + 10)), {"answer": "1"}) for one in numbers]
        for name, column in arrays_of(frame_of(some, pictures=False)).items():
            columns[name].append(column)
    return PromptTable("source", encoded({name: np.concatenate(column) for name, column in columns.items()}))


def place(count):
    """Return the figures of a place in the data of so many prompts."""
    mixture = Mixture([table_of(count // 2, 0), table_of(count // 2, count)], [1, 3], seed=0, shuffle=True)

    def boundary():
        return [
            SourceState(epoch=epoch, position=position, prompts=len(table), digest=table.digest).model_dump_json()
            for (epoch, position), table in zip(mixture.places, mixture.tables, strict=True)
        ]

    first_s, _ = timed(boundary)
    boundary_s, states = timed(boundary)
    seek_s, _ = timed(lambda: mixture.seek([(7, count // 4), (9, 0)]))
    draw_s, _ = timed(lambda: mixture.draw(1024))
    mixture.seek([(7, count // 2), (9, count // 2)])
    epoch_s, _ = timed(lambda: mixture.draw(1024))
    return {
        "state_bytes": sum(map(len, states)),
        "boundary_first_s": first_s,
        "boundary_s": boundary_s,
        "seek_s": seek_s,
        "draw_s": draw_s,
        "epoch_s": epoch_s,
    }


def main():
    parser = argument_parser(__doc__)
    parser.add_argument("--steps", type=int, nargs="+", default=[100, 10_000, 100_000], help="numbers of steps")
    parser.add_argument("--sample-bytes", type=int, default=8000, help="bytes of a sample, about")
    parser.add_argument("--prompts", type=int, nargs="+", default=[10_000, 1_000_000], help="numbers of prompts")
    arguments = parser.parse_args()
    runs, places = {}, {}
    for steps in arguments.steps:
        progress(f"{steps} steps")
        with tempfile.TemporaryDirectory() as folder:
            runs[f"{steps} steps"] = records(Path(folder, "run"), steps, arguments.sample_bytes)
    for count in arguments.prompts:
        progress(f"{count} prompts")
        places[f"{count} prompts"] = place(count)
    report({"records": runs, "place": places}, as_json=arguments.json)


if __name__ == "__main__":
    main()
