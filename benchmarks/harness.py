"""The harness of every benchmark here: its arguments, measurements in turn, and its report.

With ``--json`` a benchmark prints one JSON object: ``device``, ``versions``, ``command`` and ``figures``. Without it,
the same as text and tables. What it is doing meanwhile goes to the standard error output.

Figures are numbers by name, and tables: a mapping of rows, each a mapping of columns. A name ends in its unit (``_s``,
``_ms``, ``_bytes``), or is a ratio.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from anytron.device.patches.plan import installed_version

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from anytron.device.runtime import DeviceRuntime

    Number = int | float | None
    Table = Mapping[str, Mapping[str, Number]]
    Figures = Mapping[str, Number | Table]

Result = TypeVar("Result")

PACKAGES = (
    "anytron",
    "torch",
    "megatron-core",
    "mcore-bridge",
    "transformers",
    "transformer-engine",
    "flash-attn",
    "flash-attn-3",
    "triton",
    "vllm",
    "trl",
)
"""Whose versions matter to figures, as far as they are installed."""
MODEL_OF_100M = (
    "model.config.vocab_size=151936",
    "model.config.hidden_size=512",
    "model.config.intermediate_size=1536",
    "model.config.num_hidden_layers=8",
    "model.config.num_attention_heads=8",
    "model.config.num_key_value_heads=4",
    "model.config.head_dim=64",
    "model.config.tie_word_embeddings=true",
    "data.options.digits=15",
    "data.prompts_per_step=16",
    "rollout.samples_per_prompt=4",
    "rollout.max_new_tokens=16",
)
"""Of examples/grpo_sort.yaml: the shape of a small Qwen3, with 103 million parameters, and steps that are as small."""
LOAD = os.getloadavg()[0]
"""What else the machine did as the benchmark began."""


def argument_parser(description: str) -> argparse.ArgumentParser:
    """Make a parser that knows ``--json``.

    Args:
        description: The benchmark's docstring.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    return parser


def progress(text: str) -> None:
    """Say what the benchmark is doing."""
    print(text, file=sys.stderr, flush=True)


def timed(call: Callable[[], Result], runtime: DeviceRuntime | None = None) -> tuple[float, Result]:
    """Call; return the seconds that it took, and its result.

    Args:
        call: What is measured.
        runtime: The device that works for it, whose queue is waited for before and afterwards.
    """
    wait = runtime.synchronize if runtime is not None else lambda: None
    wait()
    start = time.perf_counter()
    result = call()
    wait()
    return time.perf_counter() - start, result


def in_turn(ways: Mapping[str, Callable[[], Result]], turns: int, *, warm_up: int = 1) -> dict[str, list[Result]]:
    """Do the same in several ways, each once in every turn: what else the machine does then strikes all of them.

    Args:
        ways: By name, in their order.
        turns: How many count.
        warm_up: Turns before those, which pay for what is made once.

    Returns:
        What each way returned in the turns that count.
    """
    results: dict[str, list[Result]] = {name: [] for name in ways}
    for turn in range(-warm_up, turns):
        for name, way in ways.items():
            result = way()
            if turn >= 0:
                results[name].append(result)
    return results


def unless_out_of_memory(call: Callable[[], Result], runtime: DeviceRuntime) -> Result | None:
    """Call; return None if the device has no memory for it. Nothing of the call is kept then.

    Args:
        call: What may need too much.
        runtime: The device, which tells such an error from others.
    """
    try:
        return call()
    except Exception as error:
        if not runtime.is_out_of_memory(error):
            raise
        progress(f"out of memory: {error}")
    gc.collect()  # the error's frames, which hold tensors, may refer to each other
    runtime.empty_cache()
    return None


def run_measured(command: Sequence[str], *, memory: bool, every_s: float = 0.05) -> int | None:
    """Run a command to its end; what it prints is dropped, its errors are not.

    Args:
        command: A program and its arguments.
        memory: Whether to return the most memory, in bytes, that it and all its descendants had together, in which
            pages that several share count once, whoever else on the machine has them; None where it may not be
            read. Looking takes time of theirs.
        every_s: Seconds between two looks.

    Raises:
        CalledProcessError: It failed.
    """
    peak = 0
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        while memory and process.poll() is None:
            try:
                peak = max(peak, _memory(_descendants(process.pid)))
            except PermissionError:  # some containers; a sum without that process would mislead
                peak, memory = 0, False
            time.sleep(every_s)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return peak or None


def report(figures: Figures, *, as_json: bool, runtime: DeviceRuntime | None = None) -> None:
    """Print the figures, and what they belong to.

    Args:
        figures: Numbers, and tables of numbers, by name.
        as_json: The argument ``--json``.
        runtime: The device that worked; None if it was the processor.
    """
    made = {"device": device(runtime), "versions": versions(), "command": command(), "figures": figures}
    print(json.dumps(made, indent=2) if as_json else as_text(made))


def device(runtime: DeviceRuntime | None = None) -> dict[str, Any]:
    """Describe the machine, and its accelerator if that worked."""
    facts = {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "load_average": round(LOAD, 2),
    }
    if runtime is not None and runtime.device_type != "cpu":
        facts |= {"accelerator": runtime.device_name(), "accelerator_bytes": runtime.memory_stats().total}
    return facts


def versions() -> dict[str, str]:
    """Return the version of Python and of each package that matters and is installed."""
    found = {package: installed_version(package) for package in PACKAGES}
    return {"python": platform.python_version(), **{package: version for package, version in found.items() if version}}


def command() -> str:
    """Return the command that gives these figures."""
    script, *arguments = sys.argv
    return shlex.join(["python", f"benchmarks/{Path(script).name}", *arguments])


def as_text(made: Mapping[str, Any]) -> str:
    """Lay a report out for people."""
    facts = ", ".join(f"{name.removesuffix('_bytes')} {shown(name, fact)}" for name, fact in made["device"].items())
    lines = [made["command"], facts, ", ".join(f"{name} {version}" for name, version in made["versions"].items())]
    plain = {name: value for name, value in made["figures"].items() if not isinstance(value, Mapping)}
    if plain:
        width = max(map(len, plain))
        lines += ["", *(f"{name:{width}}  {shown(name, value)}" for name, value in plain.items())]
    for title, rows in made["figures"].items():
        if isinstance(rows, Mapping):
            lines += ["", *table(title, rows)]
    return "\n".join(lines)


def table(title: str, rows: Table) -> list[str]:
    """Lay a table out, its title above the names of its rows; a column that a row lacks is a dash."""
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    cells = [[title, *columns]]
    cells += [[name, *(shown(column, row.get(column)) for column in columns)] for name, row in rows.items()]
    first, *others = (max(map(len, column)) for column in zip(*cells, strict=True))
    return [
        "  ".join([name.ljust(first), *(cell.rjust(width) for cell, width in zip(values, others, strict=True))])
        for name, *values in cells
    ]


def shown(name: str, value: object) -> str:
    """Write a value for people, by the unit in which its name ends."""
    if value is None:
        return "-"
    if not isinstance(value, int | float):
        return str(value)
    if name.endswith("_bytes"):
        return f"{value / 1e9:.3g} GB" if abs(value) >= 1e9 else f"{value / 1e6:.3g} MB"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _processor() -> str:
    """The processor's name as Linux gives it; its architecture where Linux gives none."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def _descendants(pid: int) -> list[int]:
    """A process and those that it and they have started."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended
        children.setdefault(parent, []).append(int(path.parent.name))
    found = [pid]
    for process in found:
        found += children.get(process, [])
    return found


def _memory(processes: Sequence[int]) -> int:
    """Bytes of these processes: their own pages, and files once, which are nearly the same libraries in each.

    Anonymous and shared memory is proportional, each page divided by how many processes have it: they share it with
    each other alone. Files are not: any stranger with the same library would make these processes smaller.
    """
    found = [_fields(process) for process in processes]
    own = sum(fields.get("Pss_Anon", 0) + fields.get("Pss_Shmem", 0) for fields in found)
    return own + max(fields.get("RssFile", 0) for fields in found)


def _fields(pid: int) -> dict[str, int]:
    """What the kernel says about a process's memory, in bytes; nothing if the process has ended."""
    try:
        text = "".join(Path(f"/proc/{pid}/{name}").read_text() for name in ("smaps_rollup", "status"))
    except (FileNotFoundError, ProcessLookupError):
        return {}
    return {name: int(size) * 1024 for name, size in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)}
