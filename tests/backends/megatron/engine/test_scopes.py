"""A micro-batch's global state is there in its forward pass and in its recomputation, and nowhere else."""

import json
import shutil
from pathlib import Path

import pytest

SCHEDULES = {
    "one rank, full recomputation": {"engine": {"recompute": "full"}},
    "1F1B, selective recomputation": {
        "parallel": {"pipeline_model_parallel_size": 2},
        "engine": {"recompute": "selective"},
    },
    "1F1B, full recomputation": {"parallel": {"pipeline_model_parallel_size": 2}, "engine": {"recompute": "full"}},
    "interleaved, full recomputation": {
        "parallel": {"pipeline_model_parallel_size": 2},
        "engine": {"recompute": "full", "options": {"virtual_pipeline_model_parallel_size": 2}},
    },
}
LAYERS = 4


@pytest.fixture(scope="module")
def installed_witness(tmp_path_factory):
    """Install the witness for worker processes; give the file that it writes."""
    folder = tmp_path_factory.mktemp("witness")
    shutil.copy(Path(__file__).with_name("scope_witness.py"), folder)
    metadata = folder / "scope_witness-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: scope-witness\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[anytron.plugins]\nscope-witness = scope_witness:ScopeWitness\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        patch.setenv("SCOPE_WITNESS_LOG", str(folder / "witness.jsonl"))
        yield folder / "witness.jsonl"


@pytest.fixture
def witness_log(installed_witness):
    """The witness's file, empty."""
    installed_witness.unlink(missing_ok=True)
    return installed_witness


@pytest.mark.some(2)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_micro_batch_sees_the_state_of_another(schedule, witness_log, start_engine, recorded, policy_loss):
    with start_engine(**SCHEDULES[schedule]) as (workers, updates, _):
        workers.update(recorded, updates, policy_loss)
        batches = len(updates.micro_batches(recorded, 1)[0])
    events = [json.loads(line) for line in witness_log.read_text().splitlines()]
    ranks = {event["rank"] for event in events}
    chunks = SCHEDULES[schedule]["engine"].get("options", {}).get("virtual_pipeline_model_parallel_size", 1)

    attended = [event for event in events if event["event"] == "attend"]
    assert [event for event in attended if event["sees"] != event["lengths"]] == []
    # Every layer attends to every micro-batch twice: forward, and recomputed in the backward pass.
    assert len(attended) == 2 * LAYERS * batches
    assert len({tuple(event["lengths"]) for event in attended}) == batches

    for rank in ranks:
        mine = [event for event in events if event["rank"] == rank]
        # The hook ran once for each forward pass, and no scope was left open.
        assert sum(event["event"] == "preprocess" for event in mine) == batches * chunks
        depth = 0
        for event in mine:
            depth += {"enter": 1, "leave": -1}.get(event["event"], 0)
            assert depth in (0, 1)
        assert depth == 0
