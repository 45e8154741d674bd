"""Hostile and damaged files, a full disk, and updates while a checkpoint is written."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as torch_checkpoint

ROOT = Path(__file__).parents[4]
PROGRAM = "tests.backends.megatron.checkpoint.programs.one_rank"


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    return tmp_path_factory.mktemp("one-rank")


@pytest.fixture(scope="module")
def found(tiny_model, output):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-W", "ignore", "-m", PROGRAM, str(tiny_model), str(output), str(port)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_checkpoint_holds_the_state_at_the_call_while_training_goes_on(found):
    assert found["snapshot"] == {"moved": True, "unfinished": True, "before": True, "after": False}


def test_without_the_copy_it_would_hold_a_later_state(found):
    """The test above notices tensors that alias the parameters."""
    assert found["aliased"] == {"moved": True, "unfinished": True, "before": False, "after": True}


@pytest.mark.parametrize("when", ["in-time", "beside"])
def test_a_full_disk_says_what_and_how_to_go_on(found, when, output):
    error = found["full"][when]
    assert error["what"] == "The checkpoint could not be written."
    assert error["where"] == str(output / f"full-{when}")
    assert f"rank 0 on {socket.gethostname()}: OSError: [Errno 27] File too large" in error["why"]
    assert "resume=auto" in error["fix"]


def test_after_a_full_disk_training_and_saving_go_on(found):
    assert found["full"]["afterwards"]


@pytest.mark.parametrize(
    ("attack", "file", "why"),
    [
        ("evil_table", ".metadata", "posix.system"),
        ("evil_beside_a_table", ".metadata", "posix.system"),
        ("evil_part", "__0_0.distcp", "system"),
        ("evil_extra_state", ".metadata", "BytesStorageMetadata"),
        ("evil_part_elsewhere", ".metadata", "outside of the checkpoint"),
    ],
)
def test_a_malicious_file_is_refused_and_runs_nothing(found, attack, file, why, output):
    attacked = found["attacks"][attack]
    assert attacked["live"], "the payload of this test runs nothing, whoever reads it"
    assert not attacked["ran"]
    assert attacked["refused"]["where"] == str(output / attack / file)
    assert why in attacked["refused"]["why"]


def test_after_all_of_this_the_good_checkpoint_still_loads(found):
    assert found["good"]


def test_a_file_that_is_no_part_of_a_checkpoint_is_not_read(found):
    assert found["attacks"]["evil_common"] == {"refused": {}, "ran": False, "live": True}


@pytest.mark.parametrize("file", ["__0_0.distcp", ".metadata", "progress.json", "random-00000.safetensors"])
def test_a_damaged_file_is_named(found, file, output):
    error = found["damaged"][file]
    assert error["what"] == "The checkpoint is damaged, or was not written by Anytron."
    assert error["where"] == str(output / f"damaged{file}" / file)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_itself_reads_the_tensors(found, output, tiny_model):
    """The files are those of ``torch_dist``: an independent reader finds the same shapes and finite numbers."""
    table = torch_checkpoint.FileSystemReader(output / "good").read_metadata()
    state = {name: torch.full(entry.size, torch.nan) for name, entry in table.state_dict_metadata.items()}
    torch_checkpoint.load(state, storage_reader=torch_checkpoint.FileSystemReader(output / "good"), no_dist=True)
    assert state["policy.embedding.word_embeddings.weight"].shape == (97, 32)
    assert {name.split(".")[2] for name in state if name.startswith("policy.optimizer.")} == {"exp_avg", "exp_avg_sq"}
    assert all(tensor.isfinite().all() for tensor in state.values())
