"""Replayed routing and auxiliary losses, against Hugging Face's model and formulas written out."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from safetensors.torch import save_file

from anytron.sequences.batch import TokenOutputs
from tests.backends.megatron.experts.conftest import OPTIONS

EXPERTS, TOPK = 4, 2


class Oracle:
    """One update on recorded trajectories, sequence by sequence."""

    def __init__(self, directory, batch, loss, *, replay=True):
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        self.batch, self.loss = batch, loss
        self.logits, self.chosen = [], None
        for layer, block in enumerate(self.model.model.layers):
            block.mlp.gate.forward = self.gate(block.mlp.gate, layer, replay)

    def gate(self, gate, layer, replay):
        def forward(hidden):
            logits = torch.nn.functional.linear(hidden.reshape(-1, gate.hidden_dim), gate.weight)
            self.logits.append(logits)
            probs = logits.softmax(-1)
            indices = self.chosen[:, layer].long() if replay else probs.topk(TOPK).indices
            scores = probs.gather(1, indices)
            return logits, scores / scores.sum(-1, keepdim=True), indices

        return forward

    def update(self):
        """Metrics and gradient norm of the update."""
        metrics = {}

        def add(name, value):
            metrics[name] = metrics.get(name, 0.0) + float(value.detach())

        total = 0.0
        for index in range(self.batch.num_sequences):
            part = self.batch.select(torch.tensor([index]))
            self.logits, self.chosen = [], part.routing
            log_softmax = self.model(part.tokens[None]).logits[0, :-1].log_softmax(-1)
            zero = torch.zeros(1)
            log_probs = torch.cat([zero, log_softmax.gather(1, part.tokens[1:, None])[:, 0]])
            entropy = torch.cat([zero, -(log_softmax.exp() * log_softmax).sum(-1)])
            outputs = self.loss(TokenOutputs(log_probs, entropy), part)
            for name, value in outputs.metrics.items():
                add(name, value)
            share = part.token_shares.sum()
            balance, z_loss = (
                sum(formula(logits) for logits in self.logits) for formula in (load_balancing_loss, router_z_loss)
            )
            add("moe/load_balancing_loss", share * balance / len(self.logits))
            add("moe/z_loss", share * z_loss / len(self.logits))
            total = total + outputs.loss
            total = total + share * (OPTIONS["moe_aux_loss_coeff"] * balance + OPTIONS["moe_z_loss_coeff"] * z_loss)
        total.backward()
        squares = [p.grad.square().sum() for p in self.model.parameters() if p.grad is not None]
        return metrics | {"grad_norm": float(torch.stack(squares).sum().sqrt())}


def load_balancing_loss(logits):
    """Switch Transformers, arXiv:2101.03961, eq. 4, for top-k: 1 where experts are equally popular."""
    probs = logits.softmax(-1)
    fractions = torch.zeros_like(probs).scatter(1, probs.topk(TOPK).indices, 1.0).mean(0) / TOPK
    return EXPERTS * (fractions * probs.mean(0)).sum()


def router_z_loss(logits):
    """ST-MoE, arXiv:2202.08906, eq. 5."""
    return logits.logsumexp(-1).square().mean()


def compare(expected, found):
    return max(abs(expected[name] - found[name]) / max(abs(expected[name]), 0.1) for name in expected)


@pytest.fixture
def after_the_first_update(one_rank, tiny_family, tmp_path):
    config = (tiny_family("qwen3_moe") / "config.json").read_text()
    (tmp_path / "config.json").write_text(config)
    save_file(one_rank.weights[0], tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path


def test_an_update_weighs_auxiliary_losses_by_tokens(one_rank, tiny_family, policy_loss):
    expected = Oracle(tiny_family("qwen3_moe"), one_rank.batch, policy_loss).update()
    assert compare(expected, one_rank.metrics[0]) < 1e-5, (expected, one_rank.metrics[0])


def test_weights_that_have_moved_see_the_recorded_routing(one_rank, after_the_first_update, policy_loss):
    replayed = Oracle(after_the_first_update, one_rank.batch, policy_loss).update()
    assert compare(replayed, one_rank.metrics[1]) < 1e-5, (replayed, one_rank.metrics[1])
    otherwise = Oracle(after_the_first_update, one_rank.batch, policy_loss, replay=False).update()
    assert compare(otherwise, one_rank.metrics[1]) > 1e-3


def test_what_only_fills_up_a_copys_share_counts_for_nothing(train, recorded, tiny_family, policy_loss):
    """Five sequences for two copies: one gets three micro-batches, the other two and a repetition."""
    five = recorded.select(torch.arange(5))
    weight = five.response_mask / five.response_mask.sum()
    five = dataclasses.replace(five, loss_weights=weight, token_shares=weight)
    run = train(batch=five, steps=1, parallel={"data_parallel_size": 2, "expert_model_parallel_size": 2})
    expected = Oracle(tiny_family("qwen3_moe"), run.batch, policy_loss).update()
    assert compare(expected, run.metrics[0]) < 1e-5, (expected, run.metrics[0])
