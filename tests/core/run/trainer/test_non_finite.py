"""An update that gives NaN in a whole run: it stops or goes on, and what was saved is all that the update needs."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from anytron.base.errors import DataError, EngineError
from anytron.config.load import load_config
from anytron.record.tracking.lines import read_jsonl
from anytron.run.trainer.non_finite import BadUpdate, read_bad_batch, write_bad_batch
from anytron.sequences.batch import RaggedBatch
from anytron.task.data.images import ImagePatches

LOSS = """
import torch
from anytron.algorithms.contract import TokenLosses
from anytron.algorithms.losses import ppo_clip

calls = []

def moody(tokens, algorithm):
    calls.append(1)
    found = ppo_clip(tokens, algorithm)
    return TokenLosses(found.per_token * (torch.nan if len(calls) in BAD else 1.0), found.metrics)
"""


@pytest.fixture
def moody(new_run, tmp_path):
    def make(bad, **sections):
        algorithm = {"loss": "loss.py:moody", "mini_batches": 2, **sections.pop("algorithm", {})}
        (tmp_path / "config").mkdir(exist_ok=True)
        (tmp_path / "config" / "loss.py").write_text(LOSS.replace("BAD", repr(bad)))
        return new_run(algorithm=algorithm, **sections)

    return make


def test_a_run_stops_and_has_saved_mini_batch_and_weights(moody):
    run = moody({3})
    with pytest.raises(
        EngineError, match=r"(?s)not finite.*step 2, update 1 of the policy.*nan.*anytron replay"
    ) as error:
        run.train()
    directory = Path(run.config.trainer.output_dir) / "bad_batches" / "step-000002-update-1"
    assert str(directory) in error.value.fix
    assert "lower optimizer.lr" in error.value.fix
    assert {path.name for path in directory.iterdir()} == {"batch.safetensors", "batch.json", "config.yaml", "model"}
    assert (directory / "config.yaml").stat().st_mode & 0o077 == 0, "it may hold secrets"
    update, batch = read_bad_batch(directory)
    assert (update.step, update.update, update.model, update.dp_size) == (2, 1, "policy", 1)
    assert math.isnan(update.metrics["grad_norm"])
    assert batch.num_sequences == 32
    assert float(batch.loss_weights.sum()) == pytest.approx(1.0)
    assert batch.advantages is not None
    assert batch.old_log_probs is not None
    config = load_config(directory / "config.yaml")
    assert config.algorithm == run.config.algorithm
    (weights,) = (directory / "model").glob("*.safetensors")
    (engine,) = run.executor.engines
    for name, weight in load_file(weights).items():
        assert torch.equal(weight, engine.models["policy"].state_dict()[name]), name
    assert [record["step"] for record in read_jsonl(Path(run.config.trainer.output_dir) / "metrics.jsonl")] == [1]


def test_a_run_goes_on_without_the_update_and_counts_it(moody, tmp_path):
    skipping = {"on_non_finite": "skip", "total_steps": 3, "save_hf": False}
    run = moody({2, 5, 6}, trainer={**skipping, "output_dir": str(tmp_path / "run")})
    run.train()
    first, second, third = run.progress.steps
    assert [step["update/skipped"] for step in run.progress.steps] == [1, 0, 2]
    assert math.isfinite(first["grad_norm"])  # the average of the update that was done
    assert math.isfinite(second["grad_norm"])
    assert math.isnan(third["grad_norm"])  # there is none
    saved = tmp_path / "run" / "bad_batches"
    names = ["step-000001-update-2", "step-000003-update-1", "step-000003-update-2"]
    assert sorted(path.name for path in saved.iterdir()) == names
    assert not (saved / names[0] / "model").exists()


def test_the_saved_coefficient_is_that_of_the_step(moody):
    """What a replay computes with: its loss follows from the configuration that lies beside the mini-batch."""
    adaptive = {"kl_coefficient": 0.1, "kl_target": 1e-5, "kl_horizon": 640.0, "kl_estimator": "k2"}
    run = moody({2, 5}, algorithm=adaptive, trainer={"on_non_finite": "skip", "total_steps": 3, "save_hf": False})
    run.train()
    saved = Path(run.config.trainer.output_dir) / "bad_batches"
    used = {
        step: load_config(saved / f"step-00000{step}-update-{update}" / "config.yaml").algorithm.kl_coefficient
        for step, update in ((1, 2), (3, 1))
    }
    assert used == {step: run.progress.steps[step - 1]["kl/coefficient"] for step in used}
    assert used[1] == 0.1
    assert used[3] != 0.1


def test_too_many_skipped_updates_in_a_row_end_the_run(moody):
    trainer = {"on_non_finite": "skip", "max_skipped_updates": 2, "total_steps": 9}
    run = moody({1, 2, 4, 5, 6, 7}, trainer=trainer)  # the third was fine
    with pytest.raises(EngineError, match=r"(?s)3 updates in a row.*step 3, update 2 of the policy"):
        run.train()
    assert (Path(run.config.trainer.output_dir) / "bad_batches" / "step-000003-update-2" / "model").is_dir()


def test_the_critic_s_updates_are_counted_by_themselves(new_run, monkeypatch):
    sections = {"algorithm": {"advantage": "gae"}, "critic": {"optimizer": {"lr": 3e-3}}}
    run = new_run(trainer={"on_non_finite": "skip", "total_steps": 2, "save_hf": False}, **sections)
    run.executor.break_critic_at = 2
    run.train()
    assert [step["critic/update/skipped"] for step in run.progress.steps] == [0, 1]
    assert [step["update/skipped"] for step in run.progress.steps] == [0, 0]
    saved = Path(run.config.trainer.output_dir) / "bad_batches" / "step-000002-update-1-critic"
    update, batch = read_bad_batch(saved)
    assert update.model == "critic"
    assert batch.returns is not None
    stopping = new_run(
        trainer={"total_steps": 2, "overwrite": True, "output_dir": run.config.trainer.output_dir}, **sections
    )
    stopping.executor.break_critic_at = 1
    with pytest.raises(EngineError, match=r"(?s)update 1 of the critic.*no update has changed the weights yet"):
        stopping.train()
    assert (saved.parent / "step-000001-update-1-critic" / "critic").is_dir()
    assert not saved.exists()  # trainer.overwrite


def test_before_the_first_update_the_learning_rate_is_not_to_blame(moody):
    run = moody({1, 2}, trainer={"on_non_finite": "skip", "max_skipped_updates": 1})
    with pytest.raises(EngineError, match="step 1, update 2 of the policy") as error:
        run.train()
    configuration = Path(run.config.trainer.output_dir) / "config.yaml"
    assert f"so compare the engine with Hugging Face: anytron verify {configuration};" in error.value.fix
    assert ".lr" not in error.value.fix
    assert "loss.py:moody first: its loss is not finite" in error.value.fix


def test_after_it_the_learning_rate_may_be_to_blame_in_a_resumed_run_as_well(moody, new_run):
    moody({3}, trainer={"total_steps": 1}).train()
    run = moody({3}, trainer={"total_steps": 2}, resume="auto")  # the file is read once, and goes on counting
    with pytest.raises(EngineError, match=r"(?s)step 2, update 1 of the policy.*; lower optimizer\.lr"):
        run.train()
    critical = new_run(algorithm={"advantage": "gae"}, critic={}, trainer={"total_steps": 2, "overwrite": True})
    critical.executor.break_critic_at = 2
    with pytest.raises(EngineError, match=r"(?s)step 2, update 1 of the critic.*; lower critic\.optimizer\.lr"):
        critical.train()


def test_what_is_read_is_what_was_written(new_run, tmp_path):
    lengths = torch.tensor([2, 3])
    tokens = torch.arange(5)
    images = (None, ImagePatches(torch.randn(4, 6), torch.tensor([[1, 2, 2]])))
    routing = torch.arange(20, dtype=torch.uint8).view(5, 2, 2)
    batch = RaggedBatch(
        lengths, tokens, tokens > 1, 0.7, images=images, routing=routing, advantages=torch.randn(10)[::2]
    )
    update = BadUpdate(3, 1, "policy", 2, 4, 0.7, {"grad_norm": math.inf})
    for content in (batch, replace(batch, images=None)):
        write_bad_batch(tmp_path / "bad", update, content, new_run().config)  # the second in the place of the first
        again, found = read_bad_batch(tmp_path / "bad")
        assert again == update
        for field in fields(RaggedBatch):
            wanted, value = getattr(content, field.name), getattr(found, field.name)
            if isinstance(wanted, torch.Tensor):
                assert torch.equal(value, wanted), field.name
                assert value.dtype == wanted.dtype
            elif field.name != "images" or wanted is None:
                assert value == wanted
    write_bad_batch(tmp_path / "bad", update, batch, new_run().config)
    _, found = read_bad_batch(tmp_path / "bad")
    assert found.images[0] is None
    assert torch.equal(found.images[1].pixel_values, images[1].pixel_values)
    assert torch.equal(found.images[1].grid_thw, images[1].grid_thw)


@pytest.mark.parametrize("damage", ["nothing", "record", "tensors", "foreign"])
def test_a_directory_of_something_else_is_refused(damage, new_run, tmp_path):
    update = BadUpdate(3, 1, "policy", 2, 4, 0.7, {})
    if damage != "nothing":
        batch = RaggedBatch(torch.tensor([1]), torch.tensor([1]), torch.tensor([True]))
        write_bad_batch(tmp_path / "bad", update, batch, new_run().config)
    if damage == "record":
        (tmp_path / "bad" / "batch.json").write_text('{"format": 2}')
    if damage == "tensors":
        (tmp_path / "bad" / "batch.safetensors").write_bytes(b"\x00" * 20)
    if damage == "foreign":
        (tmp_path / "bad" / "batch.json").write_text("[]")
    with pytest.raises(DataError, match="not a saved mini-batch"):
        read_bad_batch(tmp_path / "bad")
