"""Collectives between processes."""

from pathlib import Path


def leftovers():
    return [path for path in Path("/dev/shm").glob("anytron-hccl-*") if path.is_dir()]


def test_collectives_on_two_ranks(run_program):
    outputs = run_program("collectives.py", ranks=2, environment={"ANYTRON_ASCEND_SIMULATOR_HCCL_TIMEOUT": "60"})
    for output in outputs:
        assert "WRONG" not in output, output
        assert output.count("ok ") >= 19, output
    # Both ranks' calls are told.
    said = "".join(outputs)
    assert "mismatch: " in said
    assert "of 2 elements" in said
    assert "of 3 elements" in said


def test_a_rank_that_never_comes_is_named(run_program):
    outputs = run_program("missing_rank.py", ranks=2, environment={"ANYTRON_ASCEND_SIMULATOR_HCCL_TIMEOUT": "2"})
    assert "ok" in outputs[0], outputs
    assert "rank 1 did not come in 2 s" in outputs[0]


def test_what_a_crashed_process_left_is_removed(run_program):
    # The programs above end without destroying their groups.
    run_program("missing_rank.py", ranks=2, environment={"ANYTRON_ASCEND_SIMULATOR_HCCL_TIMEOUT": "2"})
    assert leftovers()
    run_program(
        "import ctypes\n"
        "from anytron_ascend_simulator import preload\n"
        "preload()\n"
        "ctypes.CDLL('libhccl.so').HcclGetRootInfo(ctypes.create_string_buffer(8192))\n"
    )
    assert len(leftovers()) == 1  # that program's own
