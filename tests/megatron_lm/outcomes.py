"""Read what the ranks recorded, and put failures into classes by their messages."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

KINDS = ("passed", "failed", "error", "crashed", "skipped", "xfailed", "lost")
"""Outcomes: ``crashed`` = the process ended or the test took too long; ``lost`` = another rank had ended."""
_WORSE = {"lost": 0, "passed": 1, "xfailed": 1, "skipped": 2, "failed": 3, "error": 4, "crashed": 5}
GAP = "gap"

MEANINGS = {
    "ranks": "needs more ranks than were started",
    "runner": "memory or time limit, or another rank's end",
    "package": "a package that is not installed, or a network",
    "hardware": "a Triton kernel, CUDA's type name, NCCL",
    "refused": "an error of Anytron's that names the setting",
    "host": "the host is the device: one generator, and .cuda() makes no copy",
    "test": "bitwise equality of products of different shapes, or an error that only one version raises",
    GAP: "**a gap of Anytron's**",
}
_PATTERNS = {
    "ranks": (
        "not divisible by", "Mesh should not be bigger", "partial DistOpt shard", "check_param_hashes",
        "test_full_dp_reads", "over sized with world size", r"world size \(\d+\) is not", "requires? .* GPUs",
        "WORLD_SIZE", "world_size",
    ),
    "runner": (
        "can't allocate memory", "MemoryError", "HungTest", "^crashed", "DistNetwork", "Connection closed",
        "Broken pipe", "Resource temporarily", "microbatches calculator is already", "already initialized",
    ),
    "package": (
        "MambaSSM", "Grouped GEMM is not available", "No module named", "tensorrt_llm", "emerging_optimizers",
        "Emerging Optimizers", "nltk", "persist_layer_norm", "Connection refused", "NameResolutionError", "cuda_ext",
    ),
    "hardware": (
        "triton is not installed", "_GeneratorContextManager", "== 'cuda'", "float8_tensor", "_nccl_version",
        "cpp_extensions", "'function' object is not subscriptable",  # Megatron's own stand-in for a Triton kernel
    ),
    "refused": ("EngineError", "The portable Transformer Engine has no", "has no counterpart"),
    "host": (r"test_initialization\.py", "split_with_sizes expects"),
    "test": (r"torch\.equal", "DID NOT RAISE", "topk_indices"),
}  # fmt: skip
"""Regular expressions that find a class in "kind type message test frames"; the first class that fits is taken."""


def read(path: Path) -> list[dict[str, Any]]:
    """Return the records of one rank; a line that was being written when the process ended is left out."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return [json.loads(line) for line in lines if line.endswith("}")]


def outcomes(files: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """Return the worst record of each test over its ranks and phases, with its outcome as ``kind``."""
    worst: dict[str, dict[str, Any]] = {}
    for record in (record for path in files for record in read(path) if "id" in record):
        record["kind"] = _kind(record)
        old = worst.get(record["id"])
        if old is None or _WORSE[record["kind"]] > _WORSE[old["kind"]]:
            worst[record["id"]] = record
    return worst


def _kind(record: Mapping[str, Any]) -> str:
    message = record.get("message", "")
    if record.get("type") == "HungTestError":
        return "crashed"
    if record.get("type") == "DistNetworkError" or "Connection closed by peer" in message:
        return "lost"
    if record["outcome"] == "failed" and record["when"] in ("setup", "collect"):
        return "error"
    return str(record["outcome"])


def folder(test: str) -> str:
    """Return the folder of a test, as the table shows it."""
    path = test.partition("::")[0].removeprefix("tests/unit_tests/").split("/")
    return "/".join(path[:2]) if path[0] == "transformer" and len(path) > 2 else path[0] if len(path) > 1 else "(root)"


def class_of(record: Mapping[str, Any]) -> str:
    """Return the name of the failure's class, :data:`GAP` if it has none."""
    crashed = "crashed" if record["kind"] == "crashed" else ""
    frames = " ".join(record.get("frames", ()))
    text = f"{crashed} {record.get('type')} {record.get('message', '')} {record['id']} {frames}".strip()
    return next((name for name, patterns in _PATTERNS.items() if re.search("|".join(patterns), text)), GAP)


def failures(tests: Mapping[str, Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Yield the records of tests that did not pass and were not skipped."""
    return (record for record in tests.values() if record["kind"] in ("failed", "error", "crashed", "lost"))


def summary(tests: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return what the page shows: counts by folder and outcome, failures by class, and each gap with its message."""
    folders: dict[str, Counter[str]] = defaultdict(Counter)
    for name, record in tests.items():
        folders[folder(name)][record["kind"]] += 1
    failed = [(class_of(record), record) for record in failures(tests)]
    return {
        "folders": {name: dict(counts) for name, counts in sorted(folders.items())},
        "classes": dict(Counter(name for name, _ in failed).most_common()),
        "gaps": {
            record["id"].removeprefix("tests/unit_tests/"): f"{record.get('type')}: {record.get('message', '')[:200]}"
            for name, record in failed
            if name == GAP
        },
    }
