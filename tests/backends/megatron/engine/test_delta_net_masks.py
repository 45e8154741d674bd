"""The map of real tokens arrives at every Gated DeltaNet layer, with padded rows.

In ms-swift it does not (pull request #9196), for three reasons; each has its test here.
"""

import json
import shutil
from pathlib import Path

import pytest

LINEAR_LAYERS = 3  # of four
SCHEDULES = {
    "a text model": (
        "qwen3_next",
        {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2},
        {"recompute": "none"},
    ),
    "recomputed blocks of later stages and chunks": (
        "qwen3_5",
        {"pipeline_model_parallel_size": 2},
        {"recompute": "full", "options": {"virtual_pipeline_model_parallel_size": 2}},
    ),
}


@pytest.fixture(scope="module")
def witness(tmp_path_factory):
    """Install the witness for worker processes; give the file that it writes."""
    folder = tmp_path_factory.mktemp("witness")
    shutil.copy(Path(__file__).with_name("delta_net_witness.py"), folder)
    metadata = folder / "delta_net_witness-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: delta-net-witness\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[anytron.plugins]\ndelta-net-witness = delta_net_witness:DeltaNetWitness\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        patch.setenv("DELTA_NET_WITNESS_LOG", str(folder / "witness.jsonl"))
        yield folder / "witness.jsonl"


@pytest.fixture(scope="module")
def observe(witness, start_engine, tiny_family, recorded, policy_loss):
    """Do one update; give what each layer of each rank saw, and the lengths of the micro-batches."""

    def run(schedule):
        family, parallel, engine = SCHEDULES[schedule]
        witness.unlink(missing_ok=True)
        with start_engine(
            model={"path": str(tiny_family(family))},
            parallel=parallel,
            engine={"sequence_format": "bshd", **engine},
        ) as (workers, updates, _):
            workers.update(recorded, updates, policy_loss)
            batches = [part.batch.lengths.tolist() for part in updates.micro_batches(recorded, 1)[0]]
        return [json.loads(line) for line in witness.read_text().splitlines()], batches

    return run


@pytest.fixture(scope="module")
def of_a_text_model(observe):
    return observe("a text model")


@pytest.fixture(scope="module")
def of_a_vision_model(observe):
    return observe("recomputed blocks of later stages and chunks")


def shows(event):
    """Lengths of an event's rows: ones, then zeros; None if it shows anything else."""
    lengths = [sum(row) for row in event["rows"]]
    return lengths if all(row == sorted(row, reverse=True) for row in event["rows"]) else None


@pytest.mark.slow
def test_reason_1_a_class_that_nobody_builds_read_the_mask(of_a_text_model):
    """mcore-bridge builds Megatron's class unless USE_MCORE_GDN=0; only the other one looked at a mask.

    Here every layer that is built, on both tensor-parallel ranks, sees whole rows and no padding.
    """
    events, batches = of_a_text_model
    assert any(len(set(lengths)) > 1 for lengths in batches), "no micro-batch has padding"
    assert {event["rank"] for event in events} == {0, 1}
    for rank in (0, 1):
        seen = [shows(event) for event in events if event["rank"] == rank]
        assert sorted(seen) == sorted(batches * LINEAR_LAYERS)


def test_reason_2_a_vision_language_model_forgot_it_after_the_images_and_on_later_stages(of_a_vision_model):
    """MultimodalGPTModel clears its keyword arguments on the first stage and has none on the others."""
    events, batches = of_a_vision_model
    assert {event["rank"] for event in events} == {0, 1}
    assert [event for event in events if shows(event) not in batches] == []


def test_reason_3_blocks_hand_their_layers_nothing_that_they_do_not_know(of_a_vision_model):
    """TransformerBlock.forward has no keyword arguments to spare; nor has its recomputation.

    Each layer computes each micro-batch twice, the second time in the backward pass, between forward
    passes of other micro-batches, and sees that micro-batch's padding both times.
    """
    events, batches = of_a_vision_model
    assert len(batches) > 1
    assert sorted(shows(event) for event in events) == sorted(batches * LINEAR_LAYERS * 2)


def test_a_mask_that_calls_padding_real_is_seen_here(observe, monkeypatch):
    monkeypatch.setenv("DELTA_NET_WITNESS", "lie")
    events, batches = observe("a text model")
    padded = [[max(lengths) + max(lengths) % 2] * len(lengths) for lengths in batches]  # sequence parallelism: even
    assert sorted(shows(event) for event in events if event["rank"] == 0) == sorted(padded * LINEAR_LAYERS)
