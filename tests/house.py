"""The plan of the house: which district stands on which floor, and how to measure that the code keeps to it.

A district is a folder or a file directly inside of a package. A file may import what lies in its own district or on a
lower floor; imports for type checkers count. ``python -m tests.house --json`` measures, ``--draw`` writes the
picture in docs/explanation/architecture.md.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
DRAWN = ROOT / "docs" / "explanation" / "architecture.md"
BEGIN, END = "<!-- floors: written by python -m tests.house --draw -->", "<!-- end of floors -->"

PACKAGES = {
    "anytron": ROOT / "core" / "anytron",
    "anytron_conformance": ROOT / "core" / "anytron_conformance",
    "anytron_megatron": ROOT / "backends" / "anytron_megatron",
    "anytron_rollout": ROOT / "backends" / "anytron_rollout",
    "anytron_vllm": ROOT / "backends" / "anytron_vllm",
    "anytron_verifiers": ROOT / "backends" / "anytron_verifiers",
    "anytron_ray": ROOT / "backends" / "anytron_ray",
    "anytron_accelerator": ROOT / "plugins" / "accelerator" / "anytron_accelerator",
    "anytron_cpu": ROOT / "plugins" / "cpu" / "anytron_cpu",
    "anytron_cuda": ROOT / "plugins" / "cuda" / "anytron_cuda",
    "anytron_ascend": ROOT / "plugins" / "ascend" / "anytron_ascend",
    "anytron_ascend_simulator": ROOT / "plugins" / "ascend" / "simulator" / "anytron_ascend_simulator",
    "anytron_verl": ROOT / "plugins" / "verl" / "anytron_verl",
    "anytron_swift": ROOT / "plugins" / "swift" / "anytron_swift",
}

FLOORS: dict[str, tuple[tuple[str, ...], ...]] = {
    "anytron": (
        ("base",),
        ("config",),
        ("task",),
        ("sequences",),
        ("algorithms", "kernels"),
        ("device", "record"),
        ("workers",),
        ("serving",),
        ("run",),
        ("proof",),
        ("cli",),
        ("__init__", "__main__", "engines", "public", "tasks", "train", "verification"),
    ),
    "anytron_conformance": (
        ("subject", "tiny_models"),
        ("recorded", "rules"),
        ("compare", "micro_batches"),
        ("document", "run", "worker"),
        ("plugin", "ranks"),
        ("__init__", "device", "kernels", "sequences", "training_ranks"),
        ("model", "training"),
    ),
    "anytron_megatron": (
        ("portable_te", "redirect"),
        ("options",),
        ("training",),
        ("models",),
        ("generation", "lora"),
        ("checks",),
        ("estimate", "experts", "patches"),
        ("critic", "launch", "plugin"),
        ("building", "checkpoint", "own_trainer"),
        ("engine", "reward_model"),
        ("__init__",),
    ),
    "anytron_rollout": (
        ("checks", "generation", "invariant_experts", "options", "quantization", "weights"),
        ("invariant",),
        ("transformers_engine",),
        ("__init__",),
    ),
    "anytron_vllm": (
        ("kept", "options", "release", "requests", "routing", "sleep", "weights"),
        ("features", "installation", "start", "transfer"),
        ("checks",),
        ("engine",),
        ("__init__",),
    ),
    "anytron_verifiers": (
        ("messages", "release"),
        ("client", "tasksets"),
        ("agent", "source"),
        ("environment",),
        ("__init__",),
    ),
    "anytron_ray": (
        ("__init__", "introduction", "lease"),
        ("agent", "findings"),
        ("cluster",),
        ("group", "machines"),
        ("executor",),
    ),
    "anytron_accelerator": (("detection",), ("runtime",), ("platform",), ("__init__",)),
    "anytron_cpu": (("runtime",), ("platform",), ("__init__",)),
    "anytron_cuda": (
        ("nvml", "options"),
        ("environment", "gpus", "modules", "probe", "runtime"),
        ("capabilities",),
        ("attention", "kernels", "log_probs"),
        ("platform",),
        ("__init__",),
    ),
    "anytron_ascend": (
        ("cann", "kernels", "options", "patches"),
        ("mindspeed", "runtime", "vllm_ascend"),
        ("mindspeed_llm",),
        ("adaptors",),
        ("platform",),
        ("__init__",),
    ),
    "anytron_ascend_simulator": (
        ("memory", "queues", "random_numbers", "signatures"),
        ("build", "kernels"),
        ("calls",),
        ("deferred",),
        ("__main__", "aclnn", "aten"),
        ("activation",),
        ("__init__",),
    ),
    "anytron_swift": (
        ("__init__", "installation"),
        ("cli",),
        ("__main__", "process"),
        ("commands", "masks"),
    ),
    "anytron_verl": (
        ("__init__", "configuration", "layouts"),
        ("examination", "loading", "process", "scoring"),
        ("rollout",),
        ("engines", "verification"),
        ("device",),
        ("plugin",),
        ("activate",),
    ),
}
"""From the ground up. Packages are stacked as well: kit and backends stand on the core, plugins on backends."""


@dataclass(frozen=True)
class Import:
    """One import of a file of the house by another."""

    importer: str
    line: int
    imported: str
    path: Path

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line} imports {self.imported}"


def modules(package: str) -> dict[str, Path]:
    """The files of a package by dotted name, without the template of new platforms, which is data to it."""
    folder = PACKAGES[package]
    found = {}
    for path in sorted(folder.rglob("*.py")):
        if "template" in path.parts:
            continue
        parts = [package, *path.relative_to(folder).with_suffix("").parts]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def district_of(module: str) -> str:
    """The district of a module: the first name below its package."""
    return [*module.split("."), "__init__"][1]


def imports(package: str) -> list[Import]:
    """All imports between files of one package, wherever in a file they stand."""
    own = modules(package)
    found = []
    for name, path in own.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            targets: set[str] = set()
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for alias in node.names:
                    full = f"{node.module}.{alias.name}"
                    targets.add(full if full in own else node.module)
            elif isinstance(node, ast.Import):
                targets = {alias.name for alias in node.names}
            found += [Import(name, node.lineno, target, path) for target in targets if target in own and target != name]
    return found


def unlisted(package: str) -> list[str]:
    """Rooms that the plan does not name, and names of the plan without a district."""
    there = {district_of(name) for name in modules(package)}
    return sorted(there ^ {district for floor in FLOORS[package] for district in floor})


def climbing(package: str) -> list[Import]:
    """Imports of another district that is not on a lower floor."""
    floor = {district: number for number, districts in enumerate(FLOORS[package]) for district in districts}
    return [
        one
        for one in imports(package)
        if district_of(one.importer) != district_of(one.imported)
        and floor[district_of(one.imported)] >= floor[district_of(one.importer)]
    ]


def circles(package: str) -> list[tuple[str, ...]]:
    """Sets of files that import each other, directly or by way of others (Tarjan's strongly connected components)."""
    graph: dict[str, list[str]] = {name: [] for name in modules(package)}
    for one in imports(package):
        graph[one.importer].append(one.imported)
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[tuple[str, ...]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in graph[name]:
            if other not in index:
                visit(other)
            if other in stack:
                low[name] = min(low[name], low[other])
        if low[name] == index[name]:
            members = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(members) > 1:
                found.append(tuple(sorted(members)))

    for name in graph:
        if name not in index:
            visit(name)
    return found


def measure() -> dict[str, int]:
    """The figures of the whole house."""
    files = [path for package in PACKAGES for path in modules(package).values()]
    return {
        "circles": sum(len(circles(package)) for package in PACKAGES),
        "climbing": sum(len(climbing(package)) for package in PACKAGES),
        "districts": sum(len({district_of(name) for name in modules(package)}) for package in PACKAGES),
        "lines": sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files),
    }


def picture() -> str:
    """The floors as text, the roof first."""
    drawn = []
    for package, floors in FLOORS.items():
        rows = ["  ".join(districts) for districts in reversed(floors)]
        drawn.append("\n".join([f"{package}/", *(f"  {number:>2}  {row}" for number, row in _numbered(rows))]))
    return "```\n" + "\n\n".join(drawn) + "\n```"


def _numbered(rows: list[str]) -> list[tuple[int, str]]:
    return [(len(rows) - place, row) for place, row in enumerate(rows)]


def main() -> None:
    """Measure or draw, as asked."""
    parser = argparse.ArgumentParser(prog="python -m tests.house", description="Measure the plan of the house.")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--draw", action="store_true", help=f"write the floors into {DRAWN.relative_to(ROOT)}")
    asked = parser.parse_args()
    if asked.draw:
        text = DRAWN.read_text(encoding="utf-8")
        before, _, rest = text.partition(BEGIN)
        DRAWN.write_text(f"{before}{BEGIN}\n{picture()}\n{END}{rest.partition(END)[2]}", encoding="utf-8")
        return
    for package in PACKAGES:
        for district in unlisted(package):
            sys.stderr.write(f"{package}: the plan and the code disagree on {district}\n")
        for climb in climbing(package):
            sys.stderr.write(f"{climb}\n")
        for circle in circles(package):
            sys.stderr.write(f"circle: {' '.join(circle)}\n")
    figures = measure()
    sys.stdout.write(f"{json.dumps(figures)}\n" if asked.json else f"{figures}\n")


if __name__ == "__main__":
    main()
