"""Which variables a process with a GPU gets, and what in the user's own environment contradicts them."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.usefixtures("plugin")

ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
EVERYWHERE = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "TORCH_CUDNN_SDPA_DEPRIORITIZED": "1"}


def environment(role="trainer", user=None, needs=None, **options):
    from anytron_cuda.environment import Needs, worker_environment
    from anytron_cuda.options import CudaOptions

    return worker_environment(CudaOptions(**options), Needs(**(needs or {})), role, user or {})


def found(user, needs=None, **options):
    from anytron_cuda.environment import Needs, contradictions
    from anytron_cuda.options import CudaOptions

    return [(one.severity, one.key) for one in contradictions(CudaOptions(**options), Needs(**(needs or {})), user)]


def test_what_every_training_rank_gets():
    assert environment() == {**EVERYWHERE, ALLOCATOR: "expandable_segments:True"}


def test_engines_that_generate_keep_their_own_allocator_and_order():
    needs = {"deterministic": True, "in_order": True, "compiler": False}
    assert environment("rollout", needs=needs) == EVERYWHERE
    assert environment("rollout", visible_devices="1,2")["CUDA_VISIBLE_DEVICES"] == "1,2"


@pytest.mark.parametrize(
    ("needs", "variables"),
    [
        ({"in_order": True}, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}),
        ({"compiler": False}, {"TORCHDYNAMO_DISABLE": "1"}),
        (
            {"deterministic": True},
            {
                "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
                "NCCL_ALGO": "^NVLS",
            },
        ),
    ],
)
def test_what_a_run_needs_besides(needs, variables):
    assert environment(needs=needs) == {**environment(), **variables}


def test_the_allocator_is_left_alone_if_asked_or_set_under_its_other_name():
    assert ALLOCATOR not in environment(expandable_segments=False)
    # torch reads the older name first: ours would hide the user's.
    assert ALLOCATOR not in environment(user={"PYTORCH_ALLOC_CONF": "max_split_size_mb:512"})


@pytest.mark.parametrize(
    ("tensor", "context", "capability", "expected"),
    [
        (2, 1, (9, 0), True),
        (1, 2, (8, 0), True),
        (2, 1, None, True),
        (1, 1, (9, 0), False),
        (2, 2, (10, 0), False),
        (2, 1, (12, 0), False),
    ],
)
def test_kernels_are_queued_in_order_for_tensor_and_context_parallelism_before_blackwell(
    tensor, context, capability, expected
):
    from anytron_cuda.environment import needs_order

    assert needs_order(tensor, context, capability) is expected


def test_an_environment_that_says_nothing_contradicts_nothing():
    needs = {"deterministic": True, "in_order": True}
    assert found({}, needs, visible_devices="0") == []
    assert found(environment(needs=needs), needs) == [], "what we set ourselves is no contradiction"


@pytest.mark.parametrize(
    ("user", "needs", "options", "expected"),
    [
        ({ALLOCATOR: "max_split_size_mb:512"}, {}, {}, ("warning", "platform.options.expandable_segments")),
        ({"PYTORCH_ALLOC_CONF": "x:1"}, {}, {}, ("warning", "platform.options.expandable_segments")),
        (
            {"CUDA_DEVICE_MAX_CONNECTIONS": "8"},
            {"in_order": True},
            {},
            ("warning", "parallel.tensor_model_parallel_size"),
        ),
        ({"CUBLAS_WORKSPACE_CONFIG": ":0:0"}, {"deterministic": True}, {}, ("error", "engine.deterministic")),
        ({"NCCL_ALGO": "NVLS"}, {"deterministic": True}, {}, ("error", "engine.deterministic")),
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}, {}, {}, ("warning", "executor.call_timeout_s")),
        (
            {"CUDA_VISIBLE_DEVICES": "0"},
            {},
            {"visible_devices": "1"},
            ("error", "platform.options.visible_devices"),
        ),
        ({}, {"ranks": 2}, {"visible_devices": "3"}, ("error", "platform.options.visible_devices")),
        ({}, {"compiler": False}, {}, ("warning", "platform")),
    ],
)
def test_a_contradiction_is_found(user, needs, options, expected):
    assert found(user, needs, **options) == [expected]


@pytest.mark.parametrize(
    ("user", "needs", "options"),
    [
        ({ALLOCATOR: "max_split_size_mb:512, expandable_segments:True"}, {}, {}),
        ({ALLOCATOR: "max_split_size_mb:512"}, {}, {"expandable_segments": False}),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "8"}, {}, {}),
        ({"CUBLAS_WORKSPACE_CONFIG": ":16:8", "NCCL_ALGO": "Ring"}, {"deterministic": True}, {}),
        ({"NCCL_ALGO": "NVLS"}, {}, {}),
        ({"CUDA_VISIBLE_DEVICES": "1"}, {}, {"visible_devices": "1"}),
        ({}, {"ranks": 2}, {"visible_devices": "GPU-1,GPU-2,GPU-3"}),
    ],
)
def test_what_fits_or_does_not_matter_is_no_contradiction(user, needs, options):
    assert found(user, needs, **options) == []


def test_the_compiler_is_looked_for_as_triton_does(monkeypatch, tmp_path):
    from anytron_cuda.environment import has_compiler

    monkeypatch.setenv("PATH", str(tmp_path))
    assert not has_compiler({})
    assert has_compiler({"CC": "/opt/cc"})
    (tmp_path / "clang").touch(mode=0o755)
    assert has_compiler({})
    monkeypatch.setattr("sysconfig.get_path", lambda name, scheme: str(tmp_path))
    assert not has_compiler({})
    (tmp_path / "Python.h").touch()
    assert has_compiler({})
