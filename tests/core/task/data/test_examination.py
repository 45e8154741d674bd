"""The driver loads of a model directory what a confined process has loaded before, and of some directories nothing."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
from itertools import repeat
from types import SimpleNamespace

import pytest

from anytron.base.errors import ConfigError
from anytron.config.load import load_config
from anytron.config.schema import ModelSection
from anytron.run.preflight.prepare import prepare
from anytron.run.trainer import models, workers
from anytron.task.data import examination
from anytron.task.data.examination import examined
from tests.core.run.preflight.test_teacher import tokenizer
from tests.house import ROOT

SORT = ROOT / "examples" / "grpo_sort.yaml"
WORDS = [str(digit) for digit in range(10)] + [">", "<eos>", "<pad>"]
ROLES = ("policy", "teacher", "reward_model", "critic")
WHO_LOADS = ("AutoConfig", "AutoTokenizer")
ELSEWHERE, HERE = "elsewhere", "here"


@pytest.fixture
def directories(tmp_path):
    for role in ROLES:
        tokenizer(WORDS).save_pretrained(tmp_path / role)
        (tmp_path / role / "config.json").write_text(json.dumps({"model_type": "qwen3", "vocab_size": 16}))
    return {role: tmp_path / role for role in ROLES}


@pytest.fixture
def loads(monkeypatch):
    """Who has loaded what, in the order in which it began: (directory, in this process or in another one)."""
    import transformers

    noted = mmap.mmap(-1, 1 << 16)  # of all children too, which may write into nothing else
    driver = os.getpid()

    def watched(load):
        def loading(directory, *given, **wanted):
            noted.seek(len(noted[:].rstrip(b"\0")))
            noted.write(f"{directory.name} {HERE if os.getpid() == driver else ELSEWHERE}\n".encode())
            return load(directory, *given, **wanted)

        return loading

    for name in WHO_LOADS:
        kind = getattr(transformers, name)
        monkeypatch.setattr(kind, "from_pretrained", watched(kind.from_pretrained))

    def found():
        return [tuple(line.split()) for line in noted[:].rstrip(b"\0").decode().splitlines()]

    return found


def run_of(directories, output):
    given = {
        "model": {"path": str(directories["policy"]), "dtype": "float32"},
        "teacher": {"path": str(directories["teacher"])},
        "reward_model": {"path": str(directories["reward_model"])},
        "critic": {"path": str(directories["critic"])},
        "algorithm": {"advantage": "gae", "distillation_coefficient": 0.5},
    }
    rewards = '[{function: "sort_digits.py:reward"}, {function: reward_model}]'
    overrides = [f"{key}={json.dumps(value)}" for key, value in given.items()]
    return load_config(SORT, ["model=null", *overrides, f"rewards={rewards}", f"trainer.output_dir={output}"])


def exported(config, monkeypatch, tmp_path):
    """Export a checkpoint as far as the start of the training ranks."""

    def start(executor, config):
        raise KeyboardInterrupt

    monkeypatch.setattr(workers, "start_training", start)
    with pytest.raises(KeyboardInterrupt):
        models.export_checkpoint(config, SimpleNamespace(), tmp_path, tmp_path / "out")


@pytest.mark.parametrize("command", ["train", "export"])
def test_the_driver_loads_what_a_confined_process_has_loaded(command, directories, loads, monkeypatch, tmp_path):
    config = run_of(directories, tmp_path / "run")
    if command == "train":
        prepare(config)
    else:
        exported(config, monkeypatch, tmp_path)
    found = loads()
    assert {name for name, _ in found} == ({*ROLES} if command == "train" else {"policy"})
    assert found.index(("policy", HERE)) > max(
        place for place, load in enumerate(found) if load == ("policy", ELSEWHERE)
    )


def test_the_driver_loads_nothing_of_teacher_reward_model_and_critic(directories, loads, tmp_path):
    prepare(run_of(directories, tmp_path / "run"))
    assert {name for name, where in loads() if where == HERE} == {"policy"}


@pytest.mark.parametrize(
    "answer", [(), ("another",), ("loaded", "loaded"), repeat("loaded")], ids=["nothing", "another", "twice", "no end"]
)
def test_what_a_process_answers_that_its_files_have_taken_over_is_refused(answer, directories, monkeypatch):
    monkeypatch.setattr(examination, "_load_and_use", lambda model, note: iter(answer))
    with pytest.raises(ConfigError, match="invalid answer"), examined(ModelSection(path=str(directories["policy"]))):
        pass


@pytest.mark.parametrize("length", [True, 1.5, "16"])
def test_a_context_length_that_is_not_an_integer_is_refused(length, directories, monkeypatch):
    facts = {"vocabulary": {"0": 0}, "context_length": length}
    monkeypatch.setattr(examination, "_facts", lambda directory, key, note: facts)
    asked = {"teacher.path": directories["teacher"]}
    with (
        pytest.raises(ConfigError, match=r"(?s)teacher\.path.*invalid answer"),
        examined(ModelSection(path=str(directories["policy"])), asked),
    ):
        pass


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize(
    ("deed", "says"),
    [(os.abort, "killed by SIGABRT"), (lambda: [0] * (1 << 30), "memory"), (lambda: sys.exit(7), "SystemExit: 7")],
    ids=["aborts", "takes memory", "exits"],
)
def test_whatever_loading_does_is_an_error_that_names_the_directory(
    role, deed, says, directories, monkeypatch, tmp_path
):
    import transformers

    load = transformers.AutoConfig.from_pretrained

    def loading(directory, *given, **wanted):
        return deed() if directory.name == role else load(directory, *given, **wanted)

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", loading)
    with pytest.raises(ConfigError) as caught:
        prepare(run_of(directories, tmp_path / "run"))
    assert str(directories[role]) in caught.value.where
    assert says in caught.value.why


def test_an_error_of_the_block_is_that_error(directories):
    with pytest.raises(ZeroDivisionError), examined(ModelSection(path=str(directories["policy"]))):
        raise ZeroDivisionError


@pytest.mark.some(1)
@pytest.mark.parametrize(
    "numbers",
    [
        pytest.param(range(len(WORDS)), id="dense", marks=pytest.mark.slow),
        pytest.param(range(7, 10**7, 10**6), id="with holes"),
    ],
)
def test_what_comes_of_every_token_is_tokenised(numbers, directories):
    """A normaliser that bursts on one letter alone, which one token has, is found in the process that tries it out."""
    file = directories["policy"] / "tokenizer.json"
    whole = json.loads(file.read_text())
    whole["model"]["vocab"] = dict(zip([*WORDS[:8], "Q", "<eos>"], numbers, strict=False))
    whole["added_tokens"] = []
    double = {"type": "Replace", "pattern": {"String": "Q"}, "content": "QQ"}
    whole["normalizer"] = {"type": "Sequence", "normalizers": [double] * 40}
    file.write_text(json.dumps(whole))
    with (
        pytest.raises(ConfigError, match="A model directory cannot be loaded"),
        examined(ModelSection(path=str(directories["policy"]))),
    ):
        pass


def test_a_start_imports_no_more_than_its_config_needs(directories):
    """Llama's config imports half of transformers, which Qwen's does not need: a second and a half of each start."""
    program = (
        "import sys\n"
        "from anytron.config.schema import ModelSection\n"
        "from anytron.task.data.examination import examined\n"
        f"with examined(ModelSection(path={str(directories['policy'])!r})): pass\n"
        "print('transformers.models.llama.configuration_llama' in sys.modules, 'accelerate' in sys.modules)\n"
    )
    found = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["False", "False"]
