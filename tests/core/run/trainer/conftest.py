"""The loop's surroundings, small and real: a plain PyTorch training engine and an executor without processes."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from anytron.base import components
from anytron.base.metric import joined
from anytron.config.anchor import anchor
from anytron.config.schema import RunConfig
from anytron.device.hooks.types import ProcessInfo
from anytron.device.patches import Ledger
from anytron.device.stack import DeviceStack
from anytron.record.checkpoint.manifest import FileRecord
from anytron.run.trainer import checkpointing
from anytron.run.trainer.loop import train
from anytron.run.trainer.models import model_directory
from anytron.sequences.batch import TokenOutputs
from anytron.workers.engines.context import EngineContext
from anytron.workers.engines.rollout_engine import Response
from anytron.workers.engines.training_engine import Topology
from anytron.workers.executor.observer import OBSERVED, RankObserver
from anytron_cpu import CpuPlatform
from anytron_cpu.runtime import CpuRuntime
from tests.core.run.trainer.disturbed_runs import comparable, lines

EXAMPLES = Path(__file__).parents[4] / "examples"
FOUND: dict[tuple[object, ...], Any] = {}


def installed(**wanted: str) -> Any:
    """What ``entry_points`` finds, which reads every distribution each time: once for each path of search."""
    key = (*sys.path, *wanted.items())
    if key not in FOUND:
        FOUND[key] = entry_points(**wanted)
    return FOUND[key]


class TorchEngine:
    """A training engine of one rank: a Hugging Face model, right padding, plain Adam."""

    def __init__(self, context):
        config = context.config
        directory = model_directory(config)
        roles = ["policy", "reference"] if config.algorithm.kl_coefficient > 0 else ["policy"]
        self.models = {role: AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32) for role in roles}
        if config.teacher is not None:
            self.models["teacher"] = AutoModelForCausalLM.from_pretrained(config.teacher.path, dtype=torch.float32)
        self.optimizer = torch.optim.Adam(self.models["policy"].parameters(), lr=config.optimizer.lr)
        self.clip = config.optimizer.clip_grad
        self.version = 0
        self.critic_updates = 0
        self.break_critic_at = None
        if config.critic is not None:
            self.critic = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).model
            self.head = torch.nn.Linear(self.critic.config.hidden_size, 1, bias=False)
            torch.nn.init.zeros_(self.head.weight)
            parameters = [*self.critic.parameters(), *self.head.parameters()]
            self.critic_optimizer = torch.optim.Adam(parameters, lr=config.critic.optimizer.lr)

    def topology(self):
        return Topology(dp_rank=0, dp_size=1, reports=True)

    def forward(self, batch, role):
        lengths = batch.lengths.tolist()
        padded = pad_sequence(list(batch.tokens.split(lengths)), batch_first=True)
        real = torch.arange(padded.shape[1]) < batch.lengths[:, None]
        logits = self.models[role](padded, attention_mask=real.long()).logits / batch.temperature
        full = logits.log_softmax(-1)
        log_probs = full[:, :-1].gather(-1, padded[:, 1:, None])[..., 0]
        entropy = -(full.exp() * full).sum(-1)[:, :-1]
        first = torch.zeros(len(lengths), 1)
        return torch.cat([first, log_probs], 1)[real], torch.cat([first, entropy], 1)[real]

    @torch.no_grad()
    def score(self, micro_batches, role="policy"):
        return [TokenOutputs(*self.forward(batch, role)) for batch in micro_batches]

    def value(self, batch):
        lengths = batch.lengths.tolist()
        padded = pad_sequence(list(batch.tokens.split(lengths)), batch_first=True)
        real = torch.arange(padded.shape[1]) < batch.lengths[:, None]
        values = self.head(self.critic(padded, attention_mask=real.long()).last_hidden_state)[..., 0]
        return torch.cat([torch.zeros(len(lengths), 1), values[:, :-1]], 1)[real]

    @torch.no_grad()
    def values(self, micro_batches):
        return [self.value(batch) for batch in micro_batches]

    def update(self, micro_batches, loss):
        self.version += 1
        return self.step(
            self.optimizer, [(loss(TokenOutputs(*self.forward(batch, "policy")), batch)) for batch in micro_batches]
        )

    def update_critic(self, micro_batches, loss):
        self.critic_updates += 1
        factor = torch.nan if self.critic_updates == self.break_critic_at else 1.0
        outputs = [TokenOutputs(values=self.value(batch) * factor) for batch in micro_batches]
        return self.step(
            self.critic_optimizer, [loss(one, batch) for one, batch in zip(outputs, micro_batches, strict=True)]
        )

    def step(self, optimizer, parts):
        optimizer.zero_grad()
        loss = sum(part.loss for part in parts)
        loss.backward()
        norm = clip_grad_norm_(optimizer.param_groups[0]["params"], self.clip)
        finite = bool((loss + norm).isfinite())
        if finite:
            optimizer.step()
        totals = {name: joined(name, [part.metrics[name].item() for part in parts]) for name in parts[0].metrics}
        rates = {"grad_norm": norm.item(), "lr": optimizer.param_groups[0]["lr"]}
        return totals | rates | {"update/skipped": float(not finite)}

    def export_weights(self, destination):
        weights = {name: tensor.clone() for name, tensor in self.models["policy"].state_dict().items()}
        return destination.send(weights.items(), self.version, lambda name: False)

    def save_hf(self, path):
        self.models["policy"].save_pretrained(path)

    def save_critic(self, path):
        self.critic.save_pretrained(path)

    def stateful(self):
        parts = {"policy": self.models["policy"], "optimizer": self.optimizer}
        if hasattr(self, "critic"):
            parts |= {"critic": self.critic, "head": self.head, "critic_optimizer": self.critic_optimizer}
        return parts

    def save_checkpoint(self, path, *, asynchronous):
        state = {name: part.state_dict() for name, part in self.stateful().items()} | {"version": self.version}
        torch.save(state, Path(path) / "state.pt")
        self.saved = Path(path)
        self.unwritten = int(asynchronous)  # polls at which the files are said to be still on their way

    def written_files(self, *, wait):
        if self.unwritten and not wait:
            self.unwritten -= 1
            return None
        return {"state.pt": FileRecord.of(self.saved / "state.pt")}

    def load_checkpoint(self, path):
        state = torch.load(Path(path) / "state.pt", weights_only=True)
        for name, part in self.stateful().items():
            part.load_state_dict(state[name])
        self.version = state["version"]

    def describe(self):
        return {"engine": "torch", "device": "cpu", "patches": [], "kernels": {"log_prob_kernel": "acme"}}


class TorchRewardModel:
    """A reward model of one rank, by Hugging Face."""

    def __init__(self, context):
        path = context.config.reward_model.path
        self.model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32).eval()

    def topology(self):
        return Topology(dp_rank=0, dp_size=1, reports=True)

    @torch.no_grad()
    def score(self, micro_batches):
        sequences = [batch.tokens.split(batch.lengths.tolist()) for batch in micro_batches]
        return [torch.cat([self.model(tokens[None]).logits[0] for tokens in each]) for each in sequences]

    def describe(self):
        return {"engine": "torch", "device": "cpu", "patches": []}


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
    started: list = field(default_factory=list)
    ended: int = 0
    lose_every: int | None = None
    break_critic_at: int | None = None
    engines: list = field(default_factory=list)

    def warm_up(self, specs):
        pass

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
def new_run(tmp_path, monkeypatch):
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


@pytest.fixture
def undisturbed(new_run, tmp_path):
    """Metrics and samples of a run of ``total`` steps that nothing disturbs, and its model."""

    def train(total, **sections):
        trainer = {"total_steps": total, "output_dir": str(tmp_path / "undisturbed")}
        new_run(trainer=trainer, **sections).train()
        path = tmp_path / "undisturbed"
        return comparable(path), lines(path / "samples.jsonl"), load_file(path / "hf" / "model.safetensors")

    return train
