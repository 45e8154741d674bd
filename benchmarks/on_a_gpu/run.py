"""Test, train and measure on a borrowed GPU, without network, in ten minutes.

Installs the wheels that prepare.sh collected into an environment on top of this Python's packages, whose torch stays.
Each step has a time limit; the next one begins whatever came of it. After every step everything that is known is
written: ``results.json``, ``summary.txt`` and ``logs.txt``. A later call continues in the same environment.

    bash benchmarks/on_a_gpu/run.sh [--out DIR] [--only STEP,STEP | --rest] [--list] [--dry-run]
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import figures
import image
import wheels
from results import Results
from steps import STEPS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from steps import Step

HERE, ROOT = Path(__file__).parent, wheels.ROOT
BUILD = ROOT / "build" / "on_a_gpu"
NEEDED = (*wheels.OWN, f"torch>={image.TORCH}", "pytest>=8.3", "pytest-timeout>=2.3", "hypothesis>=6.100")
USED_IF_CARRIED = ("trl", "liger-kernel")
PREPARATION = "prepare"
PROBE_S = 120
"""Seconds that the imports of all libraries may take, from a slow disk."""
ORDER = [PREPARATION, *(step.name for step in STEPS)]


def arguments_of(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="list the steps and what came of them")
    parser.add_argument("--only", type=lambda text: text.split(","), metavar="STEP,STEP", help="these steps only")
    parser.add_argument("--rest", action="store_true", help="the steps that have not passed yet")
    parser.add_argument("--minutes", type=float, help="end by then; default 9.5, in a dry run 60")
    parser.add_argument("--out", type=Path, help="folder of the results; default $OUT, else build/on_a_gpu/out")
    parser.add_argument("--wheels", type=Path, help="folder of the pieces; default build/on_a_gpu/wheels")
    parser.add_argument("--work", type=Path, help="folder of the environment and the steps; default build/on_a_gpu")
    parser.add_argument("--dry-run", action="store_true", help="on the processor, in small sizes")
    arguments = parser.parse_args(argv)
    unknown = set(arguments.only or ()) - set(ORDER)
    if unknown:
        parser.error(f"no step is called {', '.join(sorted(unknown))}; the steps are {', '.join(ORDER)}")
    arguments.work = (arguments.work or BUILD / ("dry" if arguments.dry_run else "")).absolute()
    out = None if arguments.dry_run else os.environ.get("OUT")
    arguments.out = (arguments.out or Path(out or arguments.work / "out")).absolute()
    python = f"{sys.version_info[0]}.{sys.version_info[1]}"
    own_wheels = arguments.work / f"wheels-{python}" if arguments.dry_run else BUILD / "wheels"
    arguments.wheels = (arguments.wheels or own_wheels).absolute()
    arguments.minutes = arguments.minutes or (60 if arguments.dry_run else 9.5)
    return arguments


def selected(arguments: argparse.Namespace, results: Results) -> list[Step]:
    """The steps of this call, in order."""
    if arguments.only is not None:
        return [step for step in STEPS if step.name in arguments.only]
    if arguments.rest:
        return [step for step in STEPS if results.steps.get(step.name, {}).get("status") != "passed"]
    return list(STEPS)


def refuse(arguments: argparse.Namespace) -> None:
    """End where nothing could be measured."""
    if importlib.util.find_spec("torch") is None:
        if arguments.dry_run:
            use_image_of_its_own(arguments)
        sys.exit(f"{sys.executable} has no torch. Set PYTHON to the one that has it.")
    if not any(arguments.wheels.rglob("*.whl")):
        if not arguments.dry_run:
            sys.exit(f"There are no wheels in {arguments.wheels}. Run prepare.sh where there is a package registry.")
        subprocess.run([sys.executable, HERE / "prepare.py", "--into", arguments.wheels], check=True)
    elif arguments.dry_run and wheels.stale(wheels.carried(arguments.wheels)):
        subprocess.run([sys.executable, HERE / "prepare.py", "--own", "--into", arguments.wheels], check=True)
    if not any(arguments.wheels.rglob("pip-*.whl")):
        sys.exit(
            f"The first folder of wheels is not in {arguments.wheels}: it has pip, which installs those of the others."
        )
    for wheel in arguments.wheels.rglob("*.whl"):
        built_for = re.search(r"-cp3(\d+)-cp3\1-", wheel.name)
        if built_for and int(built_for[1]) != sys.version_info[1]:
            sys.exit(f"{wheel.name} is for Python 3.{built_for[1]}, and this is {sys.version}. Prepare for this one.")


def use_image_of_its_own(arguments: argparse.Namespace) -> None:
    """Start again with a Python that has torch and nothing else, as an image would. Needs a package registry."""
    python = arguments.work / "image" / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", python.parents[1]], check=True)
    pins = ROOT / "constraints" / "cpu.txt"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--constraint", pins, "torch"], check=True)
    sys.exit(subprocess.run([python, *sys.argv], check=False).returncode)


def prepare(arguments: argparse.Namespace, environment: image.Environment) -> dict[str, Any]:
    """Look at the image, and install what it lacks. Returns facts; ``lacking`` must be empty."""
    carried = wheels.carried(arguments.wheels)
    old = wheels.stale(carried)
    if old:
        sys.exit(
            f"Our wheels are of another state of the source, in {old[:5]}. Run prepare.sh --own where they come from."
        )
    wheels.use_packaging(carried["pip"].wheel)
    found, left_out = wheels.plan_with(
        NEEDED, [name for name in USED_IF_CARRIED if name in carried], carried, image.installed
    )
    of_image = {name: one.version for name, one in found.chosen.items() if one.wheel is None}
    from_wheels = {name: one.version for name, one in found.chosen.items() if one.wheel is not None}
    say(f"of the image: {', '.join(f'{name} {version}' for name, version in sorted(of_image.items()))}")
    say(f"from wheels: {', '.join(f'{name} {version}' for name, version in sorted(from_wheels.items()))}")
    for name, lacking in left_out.items():
        say(f"left out: {name}, because neither the image nor a wheel has {'; '.join(lacking)}")
    environment.make()
    new = environment.install(carried["pip"].wheel, found.wheels)
    note = arguments.wheels / "1" / "prepared.json"
    return {
        "commit": json.loads(note.read_text(encoding="utf-8"))["commit"] if note.exists() else None,
        "of_the_image": of_image,
        "from_wheels": from_wheels,
        "installed_now": new,
        "left_out": left_out,
        "lacking": list(found.lacking),
    }


def prepared(arguments: argparse.Namespace, environment: image.Environment, results: Results) -> bool:
    """Make the environment and probe it; say whether steps can run."""
    began = time.monotonic()
    results.facts |= prepare(arguments, environment)
    outcome: dict[str, Any] = {"status": "failed", "seconds": round(time.monotonic() - began, 1)}
    results.steps[PREPARATION] = outcome
    if results.facts["lacking"]:
        outcome["error"] = f"neither the image nor a wheel has {'; '.join(results.facts['lacking'])}"
        return False
    variables = environment.variables(arguments.work, "cpu" if arguments.dry_run else "cuda")
    ended = ask(environment, variables, results)
    outcome["seconds"] = round(time.monotonic() - began, 1)
    try:
        machine = figures.last_json(results.logs(PREPARATION)[0].read_text(encoding="utf-8", errors="replace"))
    except ValueError:
        outcome |= {"error": f"torch cannot be used{ended}", "end_of_log": results.end_of_log(PREPARATION)}
        return False
    if ended:
        outcome["remark"] = f"not every library was looked at{ended}; logs.txt may say why"
        say(outcome["remark"])
    results.facts["machine"] = machine
    say(f"devices: {', '.join(one['name'] for one in machine['devices']) or 'none'}")
    say(f"versions: {', '.join(f'{name} {version}' for name, version in machine['versions'].items() if version)}")
    if not machine["devices"] and not arguments.dry_run:
        outcome["error"] = "torch finds no GPU; look at nvidia-smi, CUDA_VISIBLE_DEVICES and the driver's version"
        return False
    outcome["status"] = "passed"
    return True


def ask(environment: image.Environment, variables: dict[str, str], results: Results) -> str:
    """Run the probe, which writes into the logs; say how it ended, unless it came to its end."""
    output, errors = results.logs(PREPARATION)
    with output.open("wb") as out, errors.open("wb") as err:
        probe = [environment.python, image.PROBE]
        try:
            done = subprocess.run(probe, env=variables, stdout=out, stderr=err, check=False, timeout=PROBE_S)
        except subprocess.TimeoutExpired:
            return f": the probe took more than {PROBE_S} s"
    return f": the probe ended with status {done.returncode}" if done.returncode else ""


def gpu_tests() -> list[str]:
    """Files with tests for a GPU: only those are collected, because others import what is not carried."""
    return sorted(
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if re.search(r"\bmark\.gpu\b", path.read_text(encoding="utf-8"))
    )


def command_of(step: Step, folder: Path, *, dry_run: bool) -> list[str]:
    """The arguments of Python."""
    words: list[str] = []
    for word in (*step.command, *(step.on_cpu if dry_run else step.on_gpu)):
        words += gpu_tests() if word == "{gpu_tests}" else [word.replace("{folder}", str(folder))]
    return words


def do(
    step: Step, arguments: argparse.Namespace, environment: image.Environment, results: Results, left_s: float
) -> None:
    """Run one step, within its limit and what is left of the whole."""
    folder = arguments.work / "steps" / step.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    command = [str(environment.python), *command_of(step, folder, dry_run=arguments.dry_run)]
    limit_s = min(step.dry_limit_s if arguments.dry_run else step.limit_s, left_s)
    outcome: dict[str, Any] = {"status": "running", "command": command, "limit_s": round(limit_s)}
    results.steps[step.name] = outcome
    results.write()
    output, errors = results.logs(step.name)
    variables = environment.variables(arguments.work, "cpu" if arguments.dry_run else "cuda")
    began = time.monotonic()
    with output.open("wb") as out, errors.open("wb") as err:
        process = subprocess.Popen(command, cwd=ROOT, env=variables, stdout=out, stderr=err, start_new_session=True)
        try:
            outcome["exit"] = process.wait(limit_s)
            outcome["status"] = "passed" if outcome["exit"] == 0 else "failed"
        except subprocess.TimeoutExpired:
            outcome["status"] = "timed out"
        finally:
            end(process)
    outcome["seconds"] = round(time.monotonic() - began, 1)
    try:
        outcome["figures"] = step.read(folder, output.read_text(encoding="utf-8", errors="replace"))
    except (LookupError, OSError, TypeError, ValueError, SyntaxError) as error:  # SyntaxError: XML
        outcome["error"] = f"no figures: {type(error).__name__}: {error}"
        outcome["status"] = "failed" if outcome["status"] == "passed" else outcome["status"]
    if outcome["status"] != "passed":
        outcome["end_of_log"] = results.end_of_log(step.name)


def end(process: subprocess.Popen) -> None:
    """End a step's processes: all that are of its group. pytest reports what it has when it is interrupted."""
    for number, seconds in ((signal.SIGINT, 8), (signal.SIGTERM, 4), (signal.SIGKILL, 4)):
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, number)
            process.wait(seconds)


def say(text: str) -> None:
    print(text, flush=True)


def main() -> int:
    arguments = arguments_of()
    ends = time.monotonic() + 60 * arguments.minutes
    results = Results(arguments.work, arguments.out, ORDER)
    if arguments.list:
        for step in STEPS:
            status = results.steps.get(step.name, {}).get("status", "-")
            say(f"{step.name:18} {step.limit_s:4} s  {status:10} {step.what}")
        return 0
    refuse(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    # A shell's background process ignores it, and so would the steps.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    environment = image.Environment(arguments.work / "environment")
    results.facts["dry_run"] = arguments.dry_run
    chosen = selected(arguments, results)
    try:
        if not prepared(arguments, environment, results):
            chosen = []
        for step in chosen:
            results.steps[step.name] = {"status": "not run", "error": "no time was left; run it with --rest"}
        for step in chosen:
            left_s = ends - time.monotonic() - 10
            if step.script is not None and not (ROOT / step.script).exists():
                results.steps[step.name] = {"status": "absent"}
            elif left_s > 20:
                do(step, arguments, environment, results, left_s)
            say(f"{step.name}: {results.steps[step.name]['status']}, {ends - time.monotonic():.0f} s left")
            results.write()
    finally:
        results.write()
    say(f"\n{results.summary()}\n\n{arguments.out}/results.json")
    asked = [PREPARATION, *(step.name for step in chosen)]
    return int(any(results.steps[name]["status"] not in ("passed", "absent") for name in asked))


if __name__ == "__main__":
    sys.exit(main())
