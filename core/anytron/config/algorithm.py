"""The section ``algorithm``: how gradients are computed."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from anytron.config.section import Section


class AlgorithmSection(Section):
    """How gradients are computed. The page docs/how-to/algorithms.md has formulas and papers."""

    name: Literal["rl", "sft"] = "rl"
    """``rl`` learns from rewards, with the estimator and the loss below. ``sft`` (supervised fine-tuning) learns from
    the responses in the data; of the keys below it uses only ``aggregation`` and ``length_constant``;
    docs/how-to/fine-tune.md."""
    advantage: str = "grpo"
    """Advantage estimator: ``grpo``, ``dr_grpo``, ``rloo`` and ``reinforce_plus_plus_baseline`` compare the responses
    to a prompt with each other; ``reinforce_plus_plus`` compares all responses of the step; ``gae`` compares each token
    with a critic's estimate (PPO; needs ``critic``); with ``none`` the policy learns from a ``teacher`` alone, and
    rewards are only measured. Or ``module:function`` / ``file.py:function``."""
    loss: str = "ppo_clip"
    """Policy loss of a token: ``ppo_clip`` is the loss of PPO and GRPO; ``gspo`` and ``gspo_token`` clip the ratios of
    whole responses; ``cispo`` clips the importance weight and keeps the gradient; ``sapo`` fades the gradient smoothly
    instead of clipping. Or ``module:function`` / ``file.py:function``."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Settings that your own estimator or loss reads; built-in estimators and losses use no options."""
    gamma: float = Field(1.0, ge=0.0, le=1.0)
    """``gae``, ``reinforce_plus_plus``: discount for each later token (default as in verl)."""
    gae_lambda: float = Field(1.0, ge=0.0, le=1.0)
    """``gae``: 0 trusts the critic, 1 the outcome (https://arxiv.org/abs/1506.02438; default as in verl)."""
    normalize_std: bool = True
    """``grpo``: divide a group's advantages by its standard deviation; ``gae``: give the advantages of a step's tokens
    mean 0 and variance 1."""
    clip_low: float = Field(0.2, ge=0.0)
    """The probability ratio is clipped below ``1 - clip_low``."""
    clip_high: float = Field(0.2, ge=0.0)
    """The probability ratio is clipped above ``1 + clip_high``."""
    dual_clip: float | None = Field(None, gt=1.0)
    """``ppo_clip``, ``gspo``, ``gspo_token``: a token of negative advantage costs at most this many times its advantage
    (dual clip, https://arxiv.org/abs/1912.09729; 3 in verl); null = no limit."""
    sapo_tau_positive: float = Field(1.0, gt=0.0)
    """``sapo``: how fast the gradient of tokens of positive advantage fades (default as in TRL and verl)."""
    sapo_tau_negative: float = Field(1.05, gt=0.0)
    """``sapo``: how fast the gradient of other tokens fades (default of the paper)."""
    importance_correction: Literal["auto", "none", "measured", "truncated", "masked"] = "auto"
    """``truncated`` multiplies the loss of each token by how much more probable training found it than the rollout did,
    up to ``importance_cap`` (truncated importance sampling); ``masked`` leaves out tokens whose factor is above
    ``importance_cap`` or below ``importance_floor``; ``measured`` records the metrics of this factor and corrects
    nothing; ``auto`` is ``truncated`` if ``rollout.max_staleness`` is above 0 or ``rollout.quantization`` is set,
    else ``none``."""
    importance_level: Literal["token", "sequence"] = "token"
    """Whether the factor of ``importance_correction`` is the probability ratio of a token or of its whole response."""
    importance_cap: float = Field(2.0, gt=0.0)
    """Largest factor of ``importance_correction`` (default as in verl)."""
    importance_floor: float = Field(0.0, ge=0.0)
    """Smallest factor that ``masked`` keeps."""
    distillation_coefficient: float = Field(0.0, ge=0.0)
    """This number times the difference in log-prob, ``teacher`` minus policy, in nats, is added to the advantage of
    each token (on-policy distillation); 1 is usual with ``advantage=none``."""
    kl_coefficient: float = Field(0.0, ge=0.0)
    """Weight of the KL divergence to the reference model; 0 = no reference model is built."""
    kl_placement: Literal["loss", "reward"] = "loss"
    """``loss``: the KL divergence is added to the loss. ``reward``: it is subtracted from the reward of each token
    before advantages are estimated, so that the policy's log-probs are computed before a step's updates."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL divergence (Schulman, http://joschu.net/blog/kl-approx.html). In the reward, ``k1`` has the
    right expected gradient; in the loss, its expected gradient is zero."""
    kl_target: float | None = Field(None, gt=0.0)
    """Change ``kl_coefficient`` from step to step so that the divergence approaches this, in nats per token
    (https://arxiv.org/abs/1909.08593, section 2.2); null = a constant coefficient."""
    kl_horizon: float = Field(10000.0, gt=0.0)
    """Samples after which a divergence that differs from ``kl_target`` by 20 % has changed the coefficient by about 20
    % (default as in verl)."""
    entropy_coefficient: float = 0.0
    """Weight of the entropy bonus."""
    aggregation: Literal["token-mean", "sequence-mean", "token-sum", "length-constant"] = "token-mean"
    """How token losses become the loss of a mini-batch: ``token-mean`` averages over all response tokens;
    ``sequence-mean`` averages within each response, then over responses; ``token-sum`` adds up all tokens;
    ``length-constant`` divides the sum of each response by ``length_constant``, then averages (Dr. GRPO)."""
    length_constant: int | None = Field(None, ge=1)
    """The constant of ``aggregation=length-constant``, in tokens; default: ``rollout.max_new_tokens``. With
    ``name=sft`` there is no default."""
    dynamic_sampling: bool = False
    """Train on groups of responses whose rewards differ, and draw new prompts to replace the other groups, which give
    no gradient (DAPO, https://arxiv.org/abs/2503.14476). The reward is the sum of ``rewards``, before penalties."""
    dynamic_sampling_rounds: int = Field(10, ge=1)
    """Rounds of drawing in a step, the first one included; each draws a prompt for every missing group. If some groups
    are missing after the last round, the step has fewer groups, and a warning says so; if all are, it has no signal."""
    max_steps_without_signal: int = Field(20, ge=1)
    """A step that has no token to train on is skipped: no group with signal for ``dynamic_sampling``, every response
    masked, failed or empty. The run ends after this number of such steps in a row."""
    overlong_buffer: int | None = Field(None, ge=1)
    """Subtract a penalty from the reward of a response that ends in this many last tokens before
    ``rollout.max_new_tokens``: it grows from 0 to ``overlong_penalty`` at the limit (soft overlong punishment of DAPO).
    Not in validation. null = no penalty."""
    overlong_penalty: float = Field(1.0, gt=0.0)
    """Penalty of a response that reaches the limit (default of the paper)."""
    overlong_masking: bool = False
    """Leave responses that ended at a limit of length or of turns out of the update and out of their groups, as if
    they had not been drawn."""
    epochs: int = Field(1, ge=1)
    """Passes over each step's samples."""
    mini_batches: int = Field(1, ge=1)
    """Optimizer updates in each pass; groups stay together."""

    @property
    def compares_a_group(self) -> bool:
        """Whether advantages compare the responses to one prompt, so that a single response gives no signal."""
        compare = ("grpo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline")
        return self.name == "rl" and self.advantage in compare

    @property
    def needs_groups(self) -> bool:
        """Whether the run needs several responses to each prompt; with one, there is no learning signal."""
        return self.compares_a_group or self.dynamic_sampling
