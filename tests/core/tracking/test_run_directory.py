"""What a run leaves."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
import yaml
from PIL import Image

from anytron.config.schema import RunConfig
from anytron.errors import ConfigError
from anytron.rewards import Sample
from anytron.tracking.plot import plot_reward, smoothed
from anytron.tracking.run_directory import RunDirectory
from anytron.tracking.sinks import JsonlSink, read_jsonl


def config(tmp_path, **trainer) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"config": {"model_type": "qwen3"}, "tokenizer": "t"},
            "data": {"source": "jsonl"},
            "rewards": [{"function": "exact_match"}],
            "trainer": {"output_dir": str(tmp_path / "run")} | trainer,
        }
    )


def sample(index: int) -> Sample:
    return Sample(f"p{index}", "31>", "1é", (3,), (1, 3), (-0.1, -0.2), finished=True, data={})


def test_the_configuration_as_resolved_can_be_run_again(tmp_path):
    original = config(tmp_path)
    with RunDirectory.create(original) as run:
        again = RunConfig.model_validate(yaml.safe_load((run.path / "config.yaml").read_text()))
    assert again == original


def test_metrics_are_on_disk_as_soon_as_they_are_written(tmp_path):
    run = RunDirectory.create(config(tmp_path))
    run.write_metrics({"step": 1, "reward/mean": 0.5})
    assert read_jsonl(run.path / "metrics.jsonl") == [{"step": 1, "reward/mean": 0.5}]
    run.close()


def test_samples_are_spread_over_the_step(tmp_path):
    with RunDirectory.create(config(tmp_path, log_samples=3)) as run:
        run.write_samples(4, [sample(index) for index in range(9)], torch.arange(9.0))
    records = read_jsonl(run.path / "samples.jsonl")
    assert [(record["prompt_id"], record["reward"]) for record in records] == [("p0", 0), ("p3", 3), ("p6", 6)]
    assert records[0]["step"] == 4
    assert records[0]["response"] == "1é"


@pytest.mark.parametrize("count", [0, 50])
def test_as_many_samples_as_there_are_at_most(tmp_path, count):
    with RunDirectory.create(config(tmp_path, log_samples=count)) as run:
        run.write_samples(1, [sample(0), sample(1)], torch.zeros(2))
    assert len(read_jsonl(run.path / "samples.jsonl")) == min(count, 2)


def test_patches_are_recorded_by_role_and_rank(tmp_path):
    with RunDirectory.create(config(tmp_path)) as run:
        run.write_patches({"trainer": [{"patches": [{"id": "a"}]}, {}], "rollout": [{}]})
    assert json.loads((run.path / "patches.json").read_text())["trainer"][0]["patches"] == [{"id": "a"}]


def test_a_directory_that_cannot_be_made_is_a_configuration_error(tmp_path):
    (tmp_path / "run").write_text("a file")
    with pytest.raises(ConfigError, match=r"(?s)cannot be written.*trainer\.output_dir"):
        RunDirectory.create(config(tmp_path))


def test_a_run_that_failed_before_its_first_samples_is_not_in_the_way(tmp_path):
    RunDirectory.create(config(tmp_path)).close()
    with RunDirectory.create(config(tmp_path)) as run:
        run.write_samples(1, [sample(0)], rewards=None)
    with pytest.raises(ConfigError, match=r"(?s)earlier run.*samples\.jsonl.*trainer\.overwrite=true"):
        RunDirectory.create(config(tmp_path))


def test_a_file_that_is_not_of_a_run_is_not_overwritten_either(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("mine: true")
    with pytest.raises(ConfigError, match="earlier run"):
        RunDirectory.create(config(tmp_path))
    assert (tmp_path / "run" / "config.yaml").read_text() == "mine: true"


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
    with RunDirectory.create(config(tmp_path, log_samples=3)) as run:
        run.write_samples(7, seen, torch.zeros(3))
    records = read_jsonl(run.path / "samples.jsonl")
    assert [record.get("images") for record in records] == [
        ["images/00007-0.png"],
        ["images/00007-0.png", "images/00007-1.png"],
        None,
    ]
    with Image.open(run.path / "images/00007-0.png") as red, Image.open(run.path / "images/00007-1.png") as small:
        assert (red.size, red.getpixel((5, 5))) == ((512, 128), (255, 0, 0))
        assert small.size == (20, 30)
    RunDirectory.create(config(tmp_path, overwrite=True)).close()
    assert not (run.path / "images").exists()
