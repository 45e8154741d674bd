"""A configuration means the same wherever it is read: its paths are absolute once it has been read."""

import os

import yaml

from anytron.config.load import load_config, read_config

TASK = """\
model: {path: models/small, tokenizer: task.py:tokenizer, processor: models/eyes, lora: {path: adapters/a}}
data: {source: jsonl, options: {path: ../data/p.jsonl, image_folder: pictures, chat: true}}
algorithm: {advantage: gae, distillation_coefficient: 0.5}
critic: {path: models/critic}
teacher: {path: ../teachers/large}
reward_model: {path: judges/model}
rollout: {python: venv/bin/python, endpoint: {key_file: keys/mine}}
environment: {command: [venv/bin/python, solve.py]}
rewards:
  - function: judges/strict.py:score
  - function: some.package:score
  - function: exact_match
  - function: reward_model
"""


def test_paths_are_relative_to_the_file_and_everything_else_stays(tmp_path, monkeypatch):
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "run.yaml").write_text(TASK)
    (tmp_path / "configs" / "venv" / "bin").mkdir(parents=True)
    (tmp_path / "configs" / "venv" / "bin" / "python").symlink_to("/usr/bin/python3")
    monkeypatch.chdir(tmp_path)

    config = load_config(tmp_path.joinpath("configs/run.yaml").relative_to(tmp_path), ["trainer.output_dir=out"])

    here = os.path.realpath(tmp_path)
    assert config.model.path == f"{here}/configs/models/small"
    assert config.model.tokenizer == f"{here}/configs/task.py:tokenizer"
    assert config.model.processor == f"{here}/configs/models/eyes"
    assert config.model.lora.path == f"{here}/configs/adapters/a"
    assert config.critic.path == f"{here}/configs/models/critic"
    assert config.teacher.path == f"{here}/teachers/large"
    assert config.reward_model.path == f"{here}/configs/judges/model"
    assert config.rollout.python == f"{here}/configs/venv/bin/python", "the link says which environment it is"
    assert config.environment.command == [f"{here}/configs/venv/bin/python", "solve.py"]
    assert config.rollout.endpoint.key_file == f"{here}/configs/keys/mine"
    assert config.data.options == {
        "path": f"{here}/data/p.jsonl",
        "image_folder": f"{here}/configs/pictures",
        "chat": True,
    }
    assert [reward.function for reward in config.rewards] == [
        f"{here}/configs/judges/strict.py:score",
        "some.package:score",
        "exact_match",
        "reward_model",
    ]
    assert config.trainer.output_dir == "out"


def test_an_option_of_a_users_own_source_is_the_users_business(tmp_path):
    (tmp_path / "run.yaml").write_text(TASK)

    config = load_config(tmp_path / "run.yaml", ["data.source=task.py:prompts", "model.tokenizer=words"])

    assert config.data.options["path"] == "../data/p.jsonl"
    assert config.model.tokenizer == os.path.realpath(tmp_path / "words")


def test_what_a_run_writes_is_read_back_from_another_directory(tmp_path):
    (tmp_path / "run.yaml").write_text(TASK)
    config = load_config(tmp_path / "run.yaml")
    (tmp_path / "elsewhere").mkdir()
    copy = tmp_path / "elsewhere" / "config.yaml"
    copy.write_text(yaml.safe_dump(config.model_dump(mode="json")))

    assert load_config(copy) == config


def test_they_can_be_relative_to_another_directory(tmp_path):
    """A checkpoint's configuration is written into a directory that nobody has heard of."""
    (tmp_path / "hidden").mkdir()
    file = tmp_path / "hidden" / "run.yaml"
    file.write_text("model: {path: base}\ndata: {source: 'tasks.py:prompts'}\nrewards: [{function: 'tasks.py:f'}]\n")
    config, _ = read_config(file, ["model.tokenizer=tasks.py:tokenizer"], relative_to=tmp_path)
    assert config.model.path == str(tmp_path / "base")
    assert config.model.tokenizer == f"{tmp_path / 'tasks.py'}:tokenizer"
