"""The loop's surroundings, small and real: a plain PyTorch training engine and an executor without processes."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

from anytron.base import components
from anytron.base.errors import ConfigError
from anytron.config.anchor import anchor
from anytron.config.schema import RunConfig
from anytron.device.hooks.types import ProcessInfo
from anytron.device.patches import Ledger
from anytron.device.stack import DeviceStack
from anytron.run.trainer import checkpointing, frame, loop
from anytron.run.trainer.loop import train
from anytron.workers.engines.context import EngineContext
from anytron.workers.engines.rollout_engine import Response
from anytron.workers.executor.observer import OBSERVED, RankObserver
from anytron_cpu import CpuPlatform
from anytron_cpu.runtime import CpuRuntime
from tests.core.run.trainer.disturbed_runs import comparable, lines
from tests.core.run.trainer.torch_engines import TorchEngine, TorchRewardModel

EXAMPLES = Path(__file__).parents[4] / "examples"
CALCULATOR = yaml.safe_load((EXAMPLES / "grpo_calculator.yaml").read_text())
FOUND: dict[tuple[object, ...], Any] = {}


def installed(**wanted: str) -> Any:
    """What ``entry_points`` finds, which reads every distribution each time: once for each path of search."""
    key = (*sys.path, *wanted.items())
    if key not in FOUND:
        FOUND[key] = entry_points(**wanted)
    return FOUND[key]


class Answer:
    """A call that is over, well or not."""

    done = True

    def __init__(self, compute):
        self.error = None
        try:
            self.results = compute()
        except Exception as error:  # noqa: BLE001 - what result() raises
            self.error = error

    def result(self):
        if self.error is not None:
            raise self.error
        return self.results


@dataclass
class InProcessGroup:
    engine: object
    size: int = 1
    ended: bool = False
    observer: RankObserver = field(default_factory=lambda: RankObserver(CpuRuntime()))

    def submit(self, method, *args, **kwargs):
        return Answer(lambda: [self.answer(method)(*args, **kwargs)])

    def call(self, method, *args, **kwargs):
        return self.submit(method, *args, **kwargs).result()

    def submit_each(self, method, shares):
        ((_, args),) = shares
        return Answer(lambda: [self.answer(method)(*args)])

    def answer(self, method):
        return getattr(self.observer if method in OBSERVED else self.engine, method)

    def scatter(self, method, shares):
        return self.submit_each(method, shares).result()

    def end(self):
        self.ended = True


class Forgetful:
    """A rollout engine that ends every n-th response before its first token."""

    def __init__(self, engine, every):
        self.engine = engine
        self.every = every

    def __getattr__(self, name):
        return getattr(self.engine, name)

    def poll(self, seconds):
        nothing = Response((), (), "stop", ())
        return [
            (number, nothing if number % self.every == 0 else response)
            for number, response in self.engine.poll(seconds)
        ]


@dataclass
class InProcessExecutor:
    """Runs engines in this process: the training engine above, the rollout engine by its entry point.

    One thread cannot send and receive at the same time, so that weights go through a file.

    With ``lose_every`` the rollout engine loses every n-th response; with ``break_critic_at`` the critic's n-th update
    gives NaN.
    """

    on_this_machine = False
    config: RunConfig
    devices: int = 4
    started: list = field(default_factory=list)
    ended: int = 0
    lose_every: int | None = None
    break_critic_at: int | None = None
    engines: list = field(default_factory=list)

    def warm_up(self, specs):
        pass

    def require_replicas(self, count):
        if count > self.devices:
            raise ConfigError("There are too few devices.", why=f"there are {self.devices}")

    def end(self):
        self.ended += 1

    def wait(self, calls, timeout_s=None):
        return list(calls)

    def start(self, spec):
        assert spec.world_size == 1
        assert 0 <= spec.replica < spec.replicas
        config = spec.config or self.config
        context = EngineContext(
            config, DeviceStack(SimpleNamespace(platform=CpuPlatform()), Ledger()), ProcessInfo(spec.role)
        )
        self.started.append(spec.role if spec.model == "policy" else spec.model)
        if spec.model == "reward_model":
            return InProcessGroup(TorchRewardModel(context))
        if spec.role == "trainer":
            engine = TorchEngine(context)
            engine.break_critic_at = self.break_critic_at
            self.engines.append(engine)
            return InProcessGroup(engine)
        (found,) = installed(group=spec.engine_group, name=spec.engine_name)
        engine = found.load().load()(context)
        return InProcessGroup(engine if self.lose_every is None else Forgetful(engine, self.lose_every))


@dataclass
class RecordedProgress:
    steps: list = field(default_factory=list)
    total: int | None = None
    finished: bool = False

    notes: list = field(default_factory=list)
    warnings: list = field(default_factory=list)
    rehearsed: list = field(default_factory=list)

    def start(self, total_steps, devices, kernels, done=0):
        self.total, self.devices, self.kernels = total_steps, devices, kernels

    def part(self, name):
        pass

    def note(self, text):
        self.notes.append(text)

    def warn(self, text):
        # Rewards of these tests are seldom sensible: what the rehearsal says of them is tested elsewhere.
        (self.rehearsed if text.startswith("rehearsal:") else self.warnings).append(text)

    def step(self, metrics):
        self.steps.append(dict(metrics))

    def finish(self):
        self.finished = True


@dataclass
class Run:
    """A run of the loop on a two-layer Qwen3 with a vocabulary of 16; sections are merged over small defaults."""

    config: RunConfig
    progress: RecordedProgress = field(default_factory=RecordedProgress)

    def __post_init__(self):
        self.executor = InProcessExecutor(self.config)

    def train(self):
        return train(self.config, self.executor, self.progress)


@pytest.fixture
def collections(monkeypatch):
    """What runs ask of the garbage collector, in order: each time it would look at every module of this process."""
    asked = []
    monkeypatch.setattr(frame, "exempt_objects", lambda: asked.append("exempt"))
    monkeypatch.setattr(loop, "collect_all", lambda: asked.append("collect"))
    return asked


@pytest.fixture
def new_run(tmp_path, monkeypatch, collections):
    """Make a run whose rewards come from functions written into a file of its own."""
    monkeypatch.setattr(components, "entry_points", installed)
    # The engine here is not the one that engine.name describes.
    monkeypatch.setattr(checkpointing, "saves_checkpoints", lambda config: config.checkpoint.keep > 0)
    monkeypatch.setattr(checkpointing, "can_save_checkpoints", lambda config: True)

    def make(reward_code: str = "", **sections) -> Run:
        directory = tmp_path / "config"
        directory.mkdir(exist_ok=True)
        code = (EXAMPLES / "sort_digits.py").read_text() + "\n\n" + reward_code
        (directory / "task.py").write_text(code)
        defaults = {
            "model": {
                "config": {
                    "model_type": "qwen3",
                    "vocab_size": 16,
                    "hidden_size": 32,
                    "intermediate_size": 64,
                    "num_hidden_layers": 2,
                    "num_attention_heads": 2,
                    "num_key_value_heads": 1,
                    "head_dim": 16,
                    "max_position_embeddings": 32,
                    "tie_word_embeddings": False,
                    "bos_token_id": None,
                    "eos_token_id": 11,
                },
                "tokenizer": "task.py:tokenizer",
                "dtype": "float32",
            },
            "data": {"source": "task.py:prompts", "options": {"count": 64, "digits": 3}, "prompts_per_step": 8},
            "rewards": [{"function": "task.py:reward"}],
            "rollout": {"samples_per_prompt": 8, "max_new_tokens": 3, "weights": "file"},
            "optimizer": {"lr": 3e-3},
            "trainer": {"total_steps": 2, "output_dir": str(tmp_path / "run")},
            "tracking": {"plot": False},
        }
        merged = {
            name: {**defaults[name], **sections.get(name, {})}
            if isinstance(defaults.get(name), dict)
            else sections.get(name, defaults.get(name))
            for name in defaults.keys() | sections.keys()
        }
        return Run(anchor(RunConfig.model_validate(merged), directory))

    return make


UNDISTURBED: dict[str, Any] = {}


@pytest.fixture
def undisturbed(new_run, tmp_path):
    """Metrics and samples of a run of ``total`` steps that nothing disturbs, and its model; each is trained once."""

    def train(total, **sections):
        key = json.dumps([total, sections], sort_keys=True)
        if key not in UNDISTURBED:
            path = tmp_path / "undisturbed"
            new_run(trainer={"total_steps": total, "output_dir": str(path)}, **sections).train()
            model = load_file(path / "hf" / "model.safetensors")
            UNDISTURBED[key] = comparable(path), lines(path / "samples.jsonl"), model
        return UNDISTURBED[key]

    return train


@pytest.fixture
def new_calculator(new_run):
    """Make the example's run, smaller."""

    def make(environment=None, **sections):
        model = CALCULATOR["model"]["config"] | {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
        defaults = {
            "model": {"config": model, "tokenizer": f"{EXAMPLES}/calculator.py:tokenizer"},
            "data": {"source": f"{EXAMPLES}/calculator.py:prompts", "options": {"count": 64}},
            "environment": {
                **CALCULATOR["environment"],
                "path": f"{EXAMPLES}/calculator.py:Calculator",
                **(environment or {}),
            },
            "rewards": CALCULATOR["rewards"],
            "rollout": {**CALCULATOR["rollout"], "samples_per_prompt": 8},
        }
        return new_run(**defaults | sections)

    return make
