"""The schema of a run's YAML file: how a model is optimized, and the models beside the policy."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from anytron.config.running import ParallelSection
from anytron.config.section import Section


class OptimizerSection(Section):
    """The optimizer and its learning rate."""

    name: Literal["adam", "sgd"] = "adam"
    """Adam, or plain SGD (which needs ``engine.distributed_optimizer=false``)."""
    lr: float = Field(1e-6, gt=0.0)
    """Peak learning rate."""
    min_lr: float = Field(0.0, ge=0.0)
    """Learning rate at the end of the decay."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Decay from ``lr`` to ``min_lr`` over ``trainer.total_steps``."""
    warmup_steps: int = Field(0, ge=0)
    """Steps of linear warm-up from 0: the first update changes nothing, as in Megatron."""
    weight_decay: float = Field(0.0, ge=0.0)
    """Weight decay: decoupled with Adam, added to the gradient with SGD."""
    beta1: float = Field(0.9, ge=0.0, lt=1.0)
    """Adam's first decay rate."""
    beta2: float = Field(0.999, ge=0.0, lt=1.0)
    """Adam's second decay rate."""
    eps: float = Field(1e-8, gt=0.0)
    """Adam's epsilon."""
    clip_grad: float = Field(1.0, ge=0.0)
    """Largest global L2 norm of the gradient; 0 = no clipping."""


class CriticSection(Section):
    """The critic of PPO, a second model: for ``algorithm.advantage=gae``, which needs it, or your own estimator."""

    path: str | None = None
    """Directory of the Hugging Face causal language model that it starts from, or of a ``critic/`` that a run has
    saved; default: the policy's model. Relative paths are relative to the YAML file."""
    optimizer: OptimizerSection = OptimizerSection()
    """Its optimizer. A critic often needs a higher rate than the policy (verl: 1e-5)."""
    clip_value: float = Field(0.5, ge=0.0)
    """How far a value may move in a step (default as in verl); 0 = no limit."""
    warmup_steps: int = Field(0, ge=0)
    """First training steps, in which the critic is trained and the policy stays."""


class TeacherSection(Section):
    """A model to learn from, itself not trained: for ``algorithm.distillation_coefficient``, or your own estimator."""

    path: str
    """Directory of a Hugging Face causal language model and its tokenizer, in which every token of the policy has the
    same id. It is split over the ranks as the policy is; the page docs/how-to/distil.md says more. Relative paths are
    relative to the YAML file."""


class RewardModelSection(Section):
    """A model that scores responses, for ``function: reward_model`` in ``rewards``; docs/how-to/use-a-reward-model.md.

    Its ranks are separate processes that share the devices of the training ranks.
    """

    path: str
    """Directory of a Hugging Face model for sequence classification with one label, and of its tokenizer, in which
    every token of the policy has the same id. Relative paths are relative to the YAML file. It computes in
    ``model.dtype``."""
    parallel: ParallelSection = ParallelSection()
    """How it is split, whatever the policy's split is: rank i shares the device of training rank i, so that it has no
    more ranks than training; the keys are the same as in section ``parallel``."""
    max_tokens_per_micro_batch: int = Field(16384, ge=1)
    """Most tokens that it reads at one time, as ``engine.max_tokens_per_micro_batch``."""
    offload: bool = False
    """Keep its weights on the host, and move them to the device only to score."""
