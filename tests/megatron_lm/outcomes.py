"""Read what the ranks recorded, and put failures into classes by their messages."""

from __future__ import annotations

import contextlib
import json
import re
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

KINDS = ("passed", "failed", "error", "crashed", "skipped", "xfailed", "lost", "not run")
"""Outcomes: ``crashed`` = the process ended or the test took too long; ``lost`` = another rank had ended; ``not run`` =
the time of the group was over."""
_WORSE = {"not run": -1, "lost": 0, "passed": 1, "xfailed": 1, "skipped": 2, "failed": 3, "error": 4, "crashed": 5}
GAP = "gap"

MEANINGS = {
    "ranks": "needs more ranks than were started",
    "runner": "a limit of memory, or what an earlier test left behind",
    "crashed": "the process ended, or the test took longer than it may",
    "package": "a package, a file or a network that this machine does not have",
    "absent": "a module that the portable Transformer Engine lacks: FP8 tensors, C++ extensions",
    "hardware": "a Triton kernel, CUDA's type name, NCCL",
    "refused": "an error of Anytron's that names the setting",
    "host": "the host is the device: one generator, no copy by .cuda(), and is_cuda for every tensor",
    "test": (
        "bitwise equality of other kernels, an order of equal values, an error that only one version raises, groups "
        "that must not be connected at once"
    ),
    "torch": "a fault of PyTorch's that a program without Anytron shows (docs/upstream/torch.md)",
    GAP: "**a gap of Anytron's**",
}
_PATTERNS = {
    "crashed": ("^crashed",),
    "ranks": (
        "not divisible by", "Mesh should not be bigger", "partial DistOpt shard", "over sized with world size",
        r"world size \(\d+\) is not", "requires? .* GPUs", "new group's world size should be less",
        r"WORLD_SIZE", r"world_size",
    ),
    "runner": (
        "can't allocate memory", "MemoryError", "DistNetwork", "Connection closed", "Broken pipe",
        "could not create a primitive", "Connection reset by peer",  # oneDNN without memory; a rank that was ended
        "Resource temporarily", "errors during test teardown", "microbatches calculator is already",
        "already initialized",
    ),
    "absent": ("No module named 'transformer_engine",),
    "package": (
        "not supported by torch LayerNorm", "MambaSSM", "Grouped GEMM is not available", "No module named",
        "tensorrt_llm", "emerging_optimizers",
        "Emerging Optimizers", "nltk", "persist_layer_norm", "Connection refused", "NameResolutionError", "cuda_ext",
    ),
    "hardware": (
        "triton is not installed", "_GeneratorContextManager", "== 'cuda'", "_nccl_version",
        r"nccl_allocator\.so: cannot open",
        "'function' object is not subscriptable",  # Megatron's own stand-in for a Triton kernel
    ),
    "refused": ("EngineError", "The portable Transformer Engine has no", "has no counterpart"),
    "torch": ("on an invalid python storage",),
    "host": (
        "split_with_sizes expects",
        r"aten\.lerp_\.Scalar",  # torch's Adam over a mesh of processors does not use the functions of lists of tensors
    ),
}  # fmt: skip
"""Regular expressions that find a class in "kind type message"; the first class that fits is taken."""
_TESTS = {
    "dist_checkpointing/test_fully_parallel.py::TestCrossRanksReads::test_full_dp_reads": "ranks",
    "dist_checkpointing/test_local.py::TestLocalCheckpointing::test_failed_save": "ranks",  # rank 1 fails
    "distributed/test_reduce_scatter_with_fp32_accumulation.py": "ranks",  # one rank has nothing to add
    "inference/engines/test_static_engine.py::TestStaticInferenceEngine::test_streaming": "test",  # the end was sampled
    "test_utils.py::test_cross_check_param_hashes": "ranks",
    "models/test_bert_model.py::TestBertModelAttentionDimensions::test_transformer_engine_version_1_7": "test",
    "transformer/test_multi_latent_attention.py::TestParallelMLAAttentionPrecision::test_gpu_forward_thd": "test",
    "transformer/test_multi_latent_attention.py::TestContextParallelMLAAttentionPrecision": "test",  # torch.equal
    # Different groups get one name at the same time; NCCL, which connects at the first use, does not notice.
    "pipeline_parallel/test_schedules.py::test_forward_backward_pipelining_with": "test",
    "transformer/moe/test_aux_loss.py::TestPaddingMaskAuxLoss::test_padding_mask_with_z_loss": "test",
    "transformer/test_attention_variant_dsa.py::TestDSAIndexer::test_dsa_indexer_with_mask": "test",  # ties of top-k
    "data/test_fim_dataset.py": "package",  # files that NVIDIA's machines have
    "data/test_preprocess_data.py::test_preprocess_data_gpt": "package",  # the same
    "tokenizers/test_tokenizer.py": "package",
    "post_training/test_modelopt_model_builder.py": "package",
    "test_nccl_allocator.py": "hardware",
    "tensor_parallel/test_initialization.py": "host",  # they seed the host and the device differently
    "test_optimizer.py::test_chained_optimizer": "host",
}
"""Classes of single tests, whose messages say nothing: beginning of the test's name below ``tests/unit_tests``."""


def read(path: Path) -> list[dict[str, Any]]:
    """Return the records of one rank; a line that was being written when the process ended is left out.

    ``{"again": [names]}`` takes back what was recorded of these tests, which run once more, and the end of the group.
    """
    if not path.exists():
        return []
    records: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(ValueError):
            record = json.loads(line)
            if (names := record.get("again")) is None:
                records.append(record)
            else:
                records = [one for one in records if "finished" not in one and _test(one) not in names]
    return records


def _test(record: Mapping[str, Any]) -> str | None:
    return next((record[key] for key in ("id", "start", "end") if key in record), None)


def interrupted(files: Iterable[Path]) -> list[str]:
    """Return the tests that ended because they, or another rank, took too long."""
    return [name for name, record in outcomes(files).items() if record["kind"] in ("crashed", "lost")]


def outcomes(files: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """Return the worst record of each test over its ranks and phases, with its outcome as ``kind``."""
    worst: dict[str, dict[str, Any]] = {}
    for path in files:
        records = read(path)
        ended = {record["end"] for record in records if "end" in record}
        found = [{**record, "kind": _kind(record)} for record in records if "id" in record]
        started = (record["start"] for record in records if "start" in record)
        found += [{"id": name, "kind": "crashed"} for name in started if name not in ended]
        collected = (name for record in records for name in record.get("collected", ()))
        found += [{"id": name, "kind": "not run"} for name in collected]
        for record in found:
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
    if message.startswith("errors during test teardown"):  # two of them: the test's and the class's, after a rank hung
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
    test = record["id"].removeprefix("tests/unit_tests/")
    if (known := next((name for start, name in _TESTS.items() if test.startswith(start)), None)) is not None:
        return known
    text = f"{record['kind']} {record.get('type')} {record.get('message', '')}"
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
            if name in (GAP, "crashed")
        },
    }
