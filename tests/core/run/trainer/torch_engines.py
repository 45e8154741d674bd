"""Engines of one rank for tests of the loop: plain PyTorch, Hugging Face's models."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from anytron.base.metric import joined
from anytron.record.checkpoint.manifest import FileRecord
from anytron.run.trainer.models import model_directory
from anytron.sequences.batch import TokenOutputs
from anytron.workers.engines.training_engine import Topology


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
