"""Run Megatron-LM's unit tests on the device stack: ``python -m tests.megatron_lm [GROUP...]``.

``ANYTRON_MEGATRON_LM`` names a checkout of Megatron-LM of the version of megatron-core that is installed. Its tests and
``megatron.training`` come from there, ``megatron.core`` from the installed package. Each group of tests runs in
processes forked from one that has imported the device stack and most of Megatron. A group that ends before its last
test (a crash, a test that nothing interrupts) is started again behind that test. With several ranks, each file is a
group, and new processes are forked after ``AT_ONCE`` tests: the tests leave their process groups open, and with them
gloo's threads. Tests that hung, mostly because gloo never connects some group, are run once more in new processes.

Without groups, all folders are run (with several ranks: ``PARALLEL``), and
``docs/reference/results/megatron-suite-PLATFORM-RANKS.json`` and the page are written. The exit status is 1 if a group
has no tests.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import tests
from tests.house import ROOT
from tests.megatron_lm import VARIABLE
from tests.megatron_lm.outcomes import interrupted, outcomes, read, summary
from tests.megatron_lm.page import PAGE, RESULTS, page, table
from tests.megatron_lm.ranks import Limits, run_ranks

if TYPE_CHECKING:
    from collections.abc import Sequence

FOLDERS = (
    "tensor_parallel", "transformer/moe", "models", "fusions", "ssm", "pipeline_parallel", "distributed", "optimizer",
    "dist_checkpointing", "inference", "data,tokenizers,utils", "rl,resharding,post_training,extension", "a2a_overlap",
    "export",
)  # fmt: skip
PARALLEL = ("tensor_parallel", "pipeline_parallel", "distributed", "transformer")
"""Folders whose tests are made for several ranks."""
ALONE = ("transformer/test_te_layers_batch_invariant.py",)
"""Files that leave operators of torch replaced behind them."""
RESTARTS = 12
AT_ONCE = 25
"""Tests that one process runs, where there are several ranks."""
NO_TESTS = 5
"""Exit status of pytest for a file whose tests all need something else, such as one rank."""
AGAIN_AT_ONCE = 4
"""Tests that one process runs when it repeats tests that hung."""


def groups(unit_tests: Path) -> list[str]:
    """Return all groups: the folders, and the files beside them."""
    root = [
        path.name for path in unit_tests.glob("test_*.py") if path.name not in ("test_utilities.py", "test_basic.py")
    ]
    transformer = [f"transformer/{path.name}" for path in (unit_tests / "transformer").glob("test_*.py")]
    folders = [",".join(name for name in group.split(",") if (unit_tests / name).exists()) for group in FOLDERS]
    alone = [name for name in transformer if name in ALONE]
    others = sorted(set(transformer) - set(alone))
    return [*filter(None, folders), *alone, ",".join(others), ",".join(sorted(root))]


def files_of(names: Sequence[str], unit_tests: Path) -> list[str]:
    """Return the test files of folders and files, in folders below them too."""
    paths = [unit_tests / name for group in names for name in group.split(",")]
    found = [file for path in paths for file in (sorted(path.rglob("test_*.py")) if path.is_dir() else [path])]
    return [str(file.relative_to(unit_tests)) for file in found]


def checkout_without_core(source: Path, target: Path) -> Path:
    """Copy a checkout without ``megatron/core``, which the installed package replaces."""
    core = source / "megatron" / "core"
    if not target.exists():  # an interrupted run has made it
        partial = target.with_name(f"{target.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(source, partial, ignore=lambda at, _: ["core"] if Path(at) == core.parent else [".git"])
        partial.rename(target)
    return target


def run_group(name: str, root: Path, out: Path, arguments: argparse.Namespace) -> list[Path]:
    """Run one group to its end or its time limit; return the files of its ranks."""
    stem = name.partition(",")[0].replace("/", "__").removesuffix(".py")
    files = [out / f"{stem}.{rank}" for rank in range(arguments.ranks)]
    if arguments.ranks == 1:
        _run_tests(name, root, files, arguments, None)
        return files
    repeated = any('{"again"' in file.read_text("utf-8", "replace") for file in files if file.exists())
    _run_tests(name, root, files, arguments, AGAIN_AT_ONCE if repeated else AT_ONCE)
    if not repeated and (again := interrupted(files)):
        for file in files:
            with file.open("a", encoding="utf-8") as stream:
                stream.write(f"\n{json.dumps({'again': again})}\n")
        _run_tests(name, root, files, arguments, AGAIN_AT_ONCE)
    return files


def _run_tests(
    name: str, root: Path, files: Sequence[Path], arguments: argparse.Namespace, at_once: int | None
) -> None:
    """Run the tests that have not started yet."""
    end = monotonic() + arguments.group_seconds
    ends_early = 0
    while not _complete(files) and ends_early < RESTARTS and monotonic() < end - 5:
        begun = _started(files)
        limits = Limits(arguments.test_seconds, end - monotonic(), arguments.gib, at_once)
        run_ranks(root, name.split(","), files, begun, limits)
        ends_early += not all("finished" in record for record in _last(files))
        if _started(files) == begun:
            break


def _last(files: Sequence[Path]) -> list[dict[str, Any]]:
    return [record for file in files for record in read(file)[-1:]]


def _complete(files: Sequence[Path]) -> bool:
    """Return whether each rank has ended after the last test of the group."""
    last = _last(files)
    return len(last) == len(files) and all("finished" in record and not record["left"] for record in last)


def _started(files: Sequence[Path]) -> set[str]:
    return {record["start"] for file in files for record in read(file) if "start" in record}


def main() -> None:
    """Run the groups that the command line names, or all."""
    parser = argparse.ArgumentParser(prog="python -m tests.megatron_lm", description=__doc__)
    parser.add_argument("groups", nargs="*", metavar="GROUP", help="folder or file of tests/unit_tests; commas join")
    parser.add_argument("--platform", default="cpu", help="platform of the device stack (default: cpu)")
    parser.add_argument("--ranks", type=int, default=1, help="processes of each group (default: 1)")
    parser.add_argument("--test-seconds", type=float, default=60, help="time limit of a test (default: 60)")
    parser.add_argument(
        "--group-seconds",
        type=float,
        default=900,
        help="time limit of a group, which is a file if there are several ranks (default: 900)",
    )
    parser.add_argument("--gib", type=float, default=8, help="memory that one rank may have, in GiB (default: 8)")
    parser.add_argument(
        "--out",
        type=Path,
        help="folder for the records and the tests' output; with the records of an interrupted run, that run goes on",
    )
    arguments = parser.parse_args()
    checkout = os.environ.get(VARIABLE)
    if not checkout or not (Path(checkout) / "tests" / "unit_tests").is_dir():
        parser.error(f"{VARIABLE} must name a checkout of Megatron-LM core_v{version('megatron-core')}")
    out = (arguments.out or Path(tempfile.mkdtemp(prefix="megatron-suite-"))).resolve()
    out.mkdir(parents=True, exist_ok=True)
    root = checkout_without_core(Path(checkout), out / "checkout")
    os.chdir(root)
    sys.path.insert(0, str(root))
    tests.__path__ = [*tests.__path__, str(root / "tests")]  # both have a package of this name
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}  # read when transformers is imported
    from tests.megatron_lm.layer import open_layer

    begin = monotonic()
    open_layer(arguments.platform)
    files, empty = [], []
    unit_tests = root / "tests" / "unit_tests"
    names = arguments.groups or (groups(unit_tests) if arguments.ranks == 1 else list(PARALLEL))
    names = names if arguments.ranks == 1 else files_of(names, unit_tests)
    for number, name in enumerate(names, 1):
        files += (own := run_group(name, root, out, arguments))
        tests_of_group = outcomes(own)
        collected = any(record.get("finished") != NO_TESTS for file in own for record in read(file)[-1:])
        empty += [] if tests_of_group or not collected else [name]
        classes = summary(tests_of_group)["classes"]
        sys.stdout.write(f"{number}/{len(names)} {name[:60]}: {classes} {monotonic() - begin:.0f} s\n")
        sys.stdout.flush()
    found = {
        "megatron-core": version("megatron-core"),
        "platform": arguments.platform,
        "ranks": arguments.ranks,
        "date": datetime.now(timezone.utc).date().isoformat(),
        **summary(outcomes(files)),
    }
    sys.stdout.write(f"{table(found)}\nrecords: {out}\n")
    for test, message in found["gaps"].items():
        sys.stdout.write(f"gap: {test}\n  {message}\n")
    if empty:
        sys.stdout.write(f"no test ran in: {' '.join(empty)}; see {out}/*.log\n")
        raise SystemExit(1)
    if not arguments.groups:
        path = RESULTS / f"megatron-suite-{arguments.platform}-{arguments.ranks}.json"
        path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        PAGE.write_text(page(), encoding="utf-8")
        sys.stdout.write(f"wrote {path.relative_to(ROOT)} and {PAGE.relative_to(ROOT)}\n")


if __name__ == "__main__":
    main()
