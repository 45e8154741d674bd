"""Adapters alone reach vLLM: what it computes with them is what merged weights give."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from anytron.config.schema import LoraSection
from anytron_vllm.features import PROVED_WITH_ADAPTERS
from anytron_vllm.start import adapter_arguments
from anytron_vllm.weights import PREFIX, AdapterDirectory
from tests.backends.vllm.test_families import run
from tests.needs_vllm import NEEDS_VLLM


@pytest.mark.parametrize(("rank", "room"), [(1, 1), (2, 8), (8, 8), (300, 320), (512, 512)])
def test_vllm_s_buffers_have_room_for_the_rank(rank, room):
    assert adapter_arguments(LoraSection(rank=rank))["max_lora_rank"] == room


def test_an_adapter_is_written_over_the_one_before_with_its_factor_in_it():
    directory = AdapterDirectory(LoraSection(rank=4, alpha=8, rank_stabilized=True), torch.bfloat16)
    for value in (1.0, 3.0):
        directory.write({"m.lora_A.weight": torch.full((4, 2), value), "m.lora_B.weight": torch.full((2, 4), value)})
    found = load_file(directory.path / "adapter_model.safetensors")
    assert {(tensor.dtype, *tensor.unique().tolist()) for tensor in found.values()} == {
        (torch.bfloat16, 3.0),
        (torch.bfloat16, 12.0),  # 8 / sqrt(4)
    }
    directory.delete()
    assert not directory.path.exists()


HOLD = f"""
import time
from anytron.base.files import PrivateDirectory
with PrivateDirectory("{PREFIX}") as made:
    (made.path / "adapter_model.safetensors").write_bytes(bytes(100))
    print(made.path, flush=True)
    time.sleep(60)
"""


def test_the_adapter_of_an_engine_that_was_killed_is_deleted_by_the_one_in_its_place(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    with subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True) as engine:
        left = Path(engine.stdout.readline().strip())
        engine.send_signal(signal.SIGKILL)
    assert (left / "adapter_model.safetensors").is_file()
    directory = AdapterDirectory(LoraSection(rank=4, alpha=8), torch.bfloat16)
    assert list(tmp_path.iterdir()) == [directory.path]
    directory.delete()
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run("adapters", tmp_path_factory.mktemp("adapters"))


@pytest.mark.usefixtures("found")
class TestVllm:
    pytestmark = NEEDS_VLLM

    @pytest.mark.parametrize("family", PROVED_WITH_ADAPTERS)
    def test_log_probs_are_those_of_merged_weights_after_every_update(self, found, family):
        difference, to_the_version_before = found[family]
        assert difference < 1e-4
        assert to_the_version_before > 0.1

    def test_whole_logits_have_the_adapter_in_them(self, found):
        assert found["logits"] < 1e-4

    def test_what_is_under_way_goes_on_with_the_new_adapter_from_its_next_token(self, found):
        versions, difference = found["under way"]
        assert versions == [3, 3, 3, 4, 4, 4, 4, 4, 4, 4, 4, 4]
        assert difference < 1e-4

    @pytest.mark.parametrize("sabotage", ["not unloaded", "not written", "another layer"])
    def test_an_adapter_that_vllm_has_not_taken_is_noticed_and_nothing_is_generated(self, found, sabotage):
        refused, unusable = found[sabotage]
        assert "vLLM has a different adapter than the one that was sent" in refused
        assert "no weights" in unusable

    def test_a_damaged_adapter_is_refused_and_the_old_one_stays_in_use(self, found):
        refused, as_before = found["damaged"]
        assert "damaged in transfer" in refused
        assert as_before
