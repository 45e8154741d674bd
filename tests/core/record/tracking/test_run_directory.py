"""What a run leaves."""

from __future__ import annotations

import json
import math
import stat
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version

import pytest
import torch
import yaml
from PIL import Image

from anytron.base.errors import EngineError
from anytron.config.schema import RunConfig
from anytron.record.tracking.claim import ClaimedDirectory
from anytron.record.tracking.files import JsonlSink, plot_reward, smoothed
from anytron.record.tracking.lines import read_jsonl
from anytron.record.tracking.record import RunRecord
from anytron.record.tracking.run_directory import RunDirectory
from anytron.task.rewards import Sample
from anytron.task.rewards.answer import Failure
from anytron.task.rewards.scoring import RewardScores


def config(tmp_path, **trainer) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"config": {"model_type": "qwen3"}, "tokenizer": "t"},
            "data": {"source": "jsonl"},
            "rewards": [{"function": "exact_match"}],
            "trainer": {"output_dir": str(tmp_path / "run")} | trainer,
        }
    )


@contextmanager
def begun(config):
    """The directory of a new run."""
    with ClaimedDirectory(config, print) as claimed, RunDirectory.begin(claimed, config) as run:
        yield run


@contextmanager
def resumed(config, step):
    """The directory of a run that continues after a step."""
    with ClaimedDirectory(config, print) as claimed, RunDirectory.resume(claimed, config, step, []) as run:
        yield run


def sample(index: int) -> Sample:
    return Sample(f"p{index}", "31>", "1é", (3,), (1, 3), (-0.1, -0.2), finished=True, data={})


def scores(total) -> RewardScores:
    return RewardScores(total, {}, {})


def test_the_configuration_as_resolved_can_be_run_again(tmp_path):
    original = config(tmp_path)
    with begun(original) as run:
        again = RunConfig.model_validate(yaml.safe_load((run.path / "config.yaml").read_text()))
    assert again == original


def test_metrics_are_on_disk_as_soon_as_they_are_written(tmp_path):
    with begun(config(tmp_path)) as run:
        run.write_metrics({"step": 1, "reward/mean": 0.5})
        assert list(read_jsonl(run.path / "metrics.jsonl")) == [{"step": 1, "reward/mean": 0.5}]


def test_samples_are_spread_over_the_step(tmp_path):
    with begun(config(tmp_path, log_samples=3)) as run:
        run.write_samples(4, [sample(index) for index in range(9)], scores(torch.arange(9.0)))
    records = list(read_jsonl(run.path / "samples.jsonl"))
    assert [(record["prompt_id"], record["reward"]) for record in records] == [("p0", 0), ("p3", 3), ("p6", 6)]
    assert records[0]["step"] == 4
    assert records[0]["response"] == "1é"


def test_samples_that_a_reward_failed_for_are_written_with_the_reason(tmp_path):
    failure = Failure("A reward function raised an exception.", "LookupError: " + 5000 * "x")
    rewards = RewardScores(torch.tensor([0.5] + 29 * [torch.nan]), {}, {"judge": dict.fromkeys(range(1, 30), failure)})
    with begun(config(tmp_path, log_samples=1)) as run:
        run.write_samples(1, [sample(index) for index in range(30)], rewards)
    first, *failed = read_jsonl(run.path / "samples.jsonl")
    assert first["reward"] == 0.5
    assert "reward_errors" not in first
    assert [record["prompt_id"] for record in failed] == [f"p{index}" for index in range(1, 17)]
    assert all(record["reward"] is None and len(record["reward_errors"]["judge"]) == 2000 for record in failed)
    assert failed[0]["reward_errors"]["judge"].startswith("A reward function raised an exception. LookupError: xxx")


@pytest.mark.parametrize("count", [0, 50])
def test_as_many_samples_as_there_are_at_most(tmp_path, count):
    with begun(config(tmp_path, log_samples=count)) as run:
        run.write_samples(1, [sample(0), sample(1)], scores(torch.zeros(2)))
    assert len(list(read_jsonl(run.path / "samples.jsonl"))) == min(count, 2)


def test_patches_are_recorded_by_role_and_rank(tmp_path):
    with begun(config(tmp_path)) as run:
        run.write_patches({"trainer": [{"patches": [{"id": "a"}]}, {}], "rollout": [{}]})
    assert json.loads((run.path / "patches.json").read_text())["trainer"][0]["patches"] == [{"id": "a"}]


def test_what_was_recorded_after_the_checkpoint_is_removed_and_what_was_before_is_kept_to_the_byte(tmp_path):
    red = Image.new("RGB", (4, 4), "red")
    with begun(config(tmp_path)) as run:
        for step in (1, 2, 3):
            run.write_metrics({"step": step, "reward/mean": step / 3})
            run.write_samples(
                step, [replace(sample(0), images=(red,), response_text="\u2028\x85")], scores(torch.ones(1))
            )
    before = {name: (run.path / name).read_bytes().split(b"\n") for name in ("metrics.jsonl", "samples.jsonl")}
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "rew')  # the process was killed here

    with resumed(config(tmp_path), 2) as run:
        for name, lines in before.items():
            assert (run.path / name).read_bytes().split(b"\n") == [*lines[:2], b""]
        assert {file.name for file in (run.path / "images").iterdir()} == {"00001-0.png", "00002-0.png"}
        run.write_metrics({"step": 3, "reward/mean": 1.0})
    assert [record["step"] for record in read_jsonl(run.path / "metrics.jsonl")] == [1, 2, 3]
    assert not list(run.path.glob(".*.part"))


def test_a_line_that_was_cut_short_below_the_step_goes_too(tmp_path):
    with begun(config(tmp_path)) as run:
        run.write_metrics({"step": 1})
    (run.path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}')  # no end of line: not written whole
    with resumed(config(tmp_path), 5) as run:
        assert list(read_jsonl(run.path / "metrics.jsonl")) == [{"step": 1}]


def test_the_record_tells_of_every_resume(tmp_path):
    with begun(config(tmp_path)) as run:
        run.write_metrics({"step": 1})
    with resumed(config(tmp_path, total_steps=7), 1):
        pass
    with resumed(config(tmp_path, total_steps=9), 3) as run:
        run.finished(9)
    record = RunRecord.read(run.path)
    assert [resume.step for resume in record.resumes] == [1, 3]
    assert (record.finished_step, record.config["trainer"]["total_steps"]) == (9, 9)
    assert yaml.safe_load((run.path / "config.yaml").read_text())["trainer"]["total_steps"] == 9


def test_configurations_may_hold_secrets_and_are_private(tmp_path):
    with begun(config(tmp_path)) as run:
        pass
    for name in ("config.yaml", "run.json"):
        assert stat.S_IMODE((run.path / name).stat().st_mode) == 0o600


def test_characters_that_utf8_cannot_hold_do_not_end_a_run(tmp_path):
    with begun(config(tmp_path)) as run:
        run.write_samples(
            1, [replace(sample(0), prompt_id="\ud800", response_text="1\u2028\x852")], scores(torch.ones(1))
        )
    (record,) = read_jsonl(run.path / "samples.jsonl")
    assert (record["prompt_id"], record["response"]) == ("\ud800", "1\u2028\x852")


def test_a_sink_does_not_overwrite(tmp_path):
    JsonlSink(tmp_path / "m.jsonl").close()
    with pytest.raises(FileExistsError):
        JsonlSink(tmp_path / "m.jsonl")


def test_smoothing_keeps_a_constant_and_follows_a_step():
    assert smoothed([0.7] * 5) == pytest.approx([0.7] * 5)
    result = smoothed([0.0] * 20 + [1.0] * 60)
    assert result[19] == 0
    assert result == sorted(result)
    assert result[-1] > 0.99


@pytest.mark.parametrize("steps", [1, 50])
def test_the_plot_is_an_image_of_decent_size(tmp_path, steps):
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    for step in range(1, steps + 1):
        sink.write({"step": step, "reward/mean": 1 - math.exp(-step / 20), "reward/std": 0.1})
    sink.close()
    image = tmp_path / "plots" / "reward.png"
    plot_reward(tmp_path / "metrics.jsonl", image)

    from PIL import Image

    with Image.open(image) as opened:
        assert opened.size == (1152, 640)
        assert len(opened.convert("RGB").getcolors(1 << 24)) > 20


def test_pictures_of_samples_are_saved_once_and_small(tmp_path):
    large = Image.new("RGB", (2000, 500), "red")
    file = tmp_path / "source.png"
    Image.new("L", (20, 30)).save(file)
    seen = [replace(sample(index), images=images) for index, images in enumerate([(large,), (large, file), ()])]
    with begun(config(tmp_path, log_samples=3)) as run:
        run.write_samples(7, seen, scores(torch.zeros(3)))
    records = list(read_jsonl(run.path / "samples.jsonl"))
    assert [record.get("images") for record in records] == [
        ["images/00007-0.png"],
        ["images/00007-0.png", "images/00007-1.png"],
        None,
    ]
    with Image.open(run.path / "images/00007-0.png") as red, Image.open(run.path / "images/00007-1.png") as small:
        assert (red.size, red.getpixel((5, 5))) == ((512, 128), (255, 0, 0))
        assert small.size == (20, 30)


def test_the_error_that_ended_a_run_and_its_versions_are_in_its_record(tmp_path):
    error = EngineError("The engine broke.", where="step 3", why="\ud800" + 5000 * "x")
    with pytest.raises(EngineError), begun(config(tmp_path)) as run:
        raise error
    record = RunRecord.read(run.path)
    assert record.failure.startswith("The engine broke. (step 3) \\ud800xxx")
    assert len(record.failure) < 2100
    assert {"python", "anytron", "torch", "transformers", "megatron-core"} <= record.versions.keys()
    assert record.versions["torch"] == version("torch")

    with resumed(config(tmp_path), 0):
        assert RunRecord.read(run.path).failure is None
    assert RunRecord.read(run.path).failure is None

    with pytest.raises(KeyboardInterrupt), resumed(config(tmp_path), 0):
        raise KeyboardInterrupt
    assert RunRecord.read(run.path).failure == "KeyboardInterrupt"


def test_a_full_disk_does_not_hide_the_error_that_it_caused(tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    def break_down(run):
        monkeypatch.setattr(RunRecord, "write", full)
        raise EngineError("The engine broke.")

    with pytest.raises(EngineError), begun(config(tmp_path)) as run:
        break_down(run)
