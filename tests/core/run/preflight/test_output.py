"""A run that cannot write what it will write, or would delete what it needs, is found before it starts."""

from types import SimpleNamespace

import pytest

from anytron.base.errors import ConfigError
from anytron.config.anchor import anchor
from anytron.config.diagnostics import refuse
from anytron.config.schema import RunConfig
from anytron.run.preflight.files import output_diagnostics


@pytest.fixture
def check(tmp_path):
    def check(file="run.yaml", **sections):
        values = {
            "model": {"config": {"model_type": "qwen3"}, "tokenizer": "functions.py:tokenizer"},
            "data": {"source": "functions.py:prompts"},
            "rewards": [{"function": "functions.py:reward"}],
            "trainer": {"output_dir": str(tmp_path / "run")},
        }
        values |= {
            name: values.get(name, {}) | keys if isinstance(keys, dict) else keys for name, keys in sections.items()
        }
        config = anchor(RunConfig.model_validate(values), tmp_path)
        found = list(output_diagnostics(config, tmp_path / file))
        refuse(found)
        return [str(one) for one in found]

    return check


def test_an_output_directory_below_a_file_is_refused(check, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is not a directory"):
        check(trainer={"output_dir": str(tmp_path / "file" / "run")})


@pytest.mark.parametrize(
    ("key", "sections"),
    [
        ("model.path", {"model": {"path": "run/hf", "config": None, "tokenizer": None}}),
        ("model.tokenizer", {"model": {"tokenizer": "run/hf"}}),
        ("the configuration", {"file": "run/config.yaml"}),
        ("data.source", {"data": {"source": "run/critic/data.py:prompts"}}),
        ("data.options.path", {"data": {"source": "jsonl", "options": {"path": "run/samples.jsonl"}}}),
        ("rewards.0.function", {"rewards": [{"function": "run/plots/reward.py:reward"}]}),
        ("algorithm.loss", {"algorithm": {"loss": "run/logs/loss.py:loss"}}),
        ("teacher.path", {"teacher": {"path": "run/hf"}, "algorithm": {"distillation_coefficient": 1.0}}),
    ],
)
def test_overwriting_what_the_run_needs_is_refused(check, key, sections):
    assert check(**sections) == []
    with pytest.raises(ConfigError, match=rf"would delete {key}"):
        check(trainer={"overwrite": True}, **sections)


def test_what_lies_beside_the_files_of_a_run_is_in_no_danger(check):
    data = {"source": "jsonl", "options": {"path": "run/data.jsonl"}}
    assert check(data=data, rewards=[{"function": "run/reward.py:f"}], trainer={"overwrite": True}) == []


def test_a_disk_without_room_for_the_weights_is_found_before_the_run(check, tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(bytes(2000))
    model = {"path": "model", "config": None, "tokenizer": None}
    monkeypatch.setattr("shutil.disk_usage", lambda place: SimpleNamespace(free=1999))
    with pytest.raises(ConfigError, match=r"(?s)2 mistakes.*TMPDIR.*trainer\.output_dir"):
        check(model=model, rollout={"weights": "file"})
    with pytest.raises(ConfigError, match=r"trainer\.output_dir") as caught:
        check(model=model)
    assert "TMPDIR" not in str(caught.value)
    monkeypatch.setattr("shutil.disk_usage", lambda place: SimpleNamespace(free=2000 * 7 * 3 - 1))
    (warning,) = check(model=model)
    assert "3 checkpoints take about" in warning
    assert check(model=model, checkpoint={"keep": 1}) == []
    assert check(model=model, checkpoint={"keep": 0}) == []
