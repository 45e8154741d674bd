"""Every metric that a run writes, whatever its engine; engines add theirs (``EngineInfo.metrics``)."""

from __future__ import annotations

from anytron.metric import Metric

_CORRECTED = "`algorithm.importance_correction` is `measured` or `truncated`, also by itself"
_TURNS = "`environment` is given"
_CRITIC = "`critic` is given"
_OFFLOAD, _SLEEP = "`engine.offload` names something", "`rollout.sleep`"
_STALE = "`rollout.max_staleness` is above 0"
_POLICY = "the built-in loss"

METRICS = (
    Metric("step", "steps", "the training step, counted from 1"),
    Metric("reward/mean", "", "mean reward of the step's samples, all reward functions weighted and added"),
    Metric("reward/std", "", "its standard deviation over samples"),
    Metric(
        "reward/group_std_zero_fraction",
        "fraction",
        "groups of responses to one prompt whose rewards are all equal: they teach GRPO nothing",
        "`rollout.samples_per_prompt` is above 1",
    ),
    Metric("reward/NAME/mean", "", "mean of one reward function, without its weight", "several reward functions"),
    Metric("reward/NAME/failed", "samples", "samples that a reward function failed for"),
    Metric("response/length_mean", "tokens", "mean length of responses, without what an environment wrote"),
    Metric("response/length_max", "tokens", "the longest response of the step"),
    Metric("response/truncated_fraction", "fraction", "responses that ended at the limit, without an end of their own"),
    Metric("response/empty_fraction", "fraction", "responses without a token"),
    Metric("environment/failed", "samples", "samples whose environment failed", _TURNS),
    Metric("environment/turns_mean", "turns", "mean number of the model's turns", _TURNS),
    Metric("environment/turns_max", "turns", "the most turns of a sample", _TURNS),
    Metric("environment/observation_tokens_mean", "tokens", "mean length of what the environment wrote", _TURNS),
    Metric("environment/metrics/NAME", "", "mean of what the environment reports itself", _TURNS),
    Metric("loss/total", "", "the loss whose gradient was taken", _POLICY),
    Metric("loss/policy", "", "its clipped policy-gradient part", _POLICY),
    Metric("loss/kl", "nats", "KL divergence from the reference model, without its coefficient", _POLICY),
    Metric("policy/entropy", "nats", "mean entropy of the next-token distribution over response tokens", _POLICY),
    Metric("policy/ratio_mean", "", "mean probability ratio of the policy to that before the step's updates", _POLICY),
    Metric("policy/clip_fraction", "fraction", "response tokens whose gradient was clipped away", _POLICY),
    Metric(
        "rollout/log_prob_abs_diff",
        "nats",
        "mean difference of the log-probs that rollout and training compute for a response token; see "
        "[bad numbers](../how-to/debug-bad-numbers.md)",
        _POLICY,
    ),
    Metric(
        "rollout/kl", "nats", "KL divergence of the policy that drew the tokens from training's, estimated", _CORRECTED
    ),
    Metric("rollout/importance_mean", "", "mean importance weight of the training's policy", _CORRECTED),
    Metric("rollout/importance_clip_fraction", "fraction", "weights above `algorithm.importance_cap`", _CORRECTED),
    Metric("rollout/age_mean", "updates", "mean age of the weights that a token was drawn with", _STALE),
    Metric("rollout/age_max", "updates", "the oldest weights of the step", _STALE),
    Metric("grad_norm", "", "norm of the whole gradient before clipping (`optimizer.clip_grad`)"),
    Metric("lr", "", "learning rate of the update"),
    Metric("update/skipped", "updates", "updates that were left out, because a number was not finite"),
    Metric("critic/loss", "", "half the squared error of the values", _CRITIC),
    Metric("critic/value_mean", "", "mean value of response tokens", _CRITIC),
    Metric("critic/return_mean", "", "mean return of response tokens", _CRITIC),
    Metric("critic/clip_fraction", "fraction", "tokens whose value was clipped (`critic.clip_value`)", _CRITIC),
    Metric("critic/explained_variance", "", "how much of the returns the values knew: 1 all, 0 nothing", _CRITIC),
    Metric("critic/grad_norm", "", "as `grad_norm`, of the critic", _CRITIC),
    Metric("critic/lr", "", "as `lr`, of the critic", _CRITIC),
    Metric("critic/update/skipped", "updates", "as `update/skipped`, of the critic", _CRITIC),
    Metric("time/checkpoint_s", "seconds", "what saving a checkpoint took of the step"),
    Metric("time/rollout_s", "seconds", "waiting for responses"),
    Metric("time/sync_s", "seconds", "giving the weights to the rollout", "a rollout of its own processes"),
    Metric("time/reward_s", "seconds", "scoring responses"),
    Metric("time/score_s", "seconds", "log-probs, values and advantages before the first update"),
    Metric("time/update_s", "seconds", "all updates of the step"),
    Metric("time/step_s", "seconds", "the whole step"),
    Metric("throughput/tokens_per_s", "tokens/second", "tokens of prompts and responses by the time of the step"),
    Metric(
        "throughput/tokens_per_s_per_device",
        "tokens/second",
        "the same by the devices of training ranks and of rollout replicas that have their own",
    ),
    Metric(
        "throughput/mfu",
        "fraction",
        "model FLOP/s utilization of updates: the operations that they need (arXiv:2204.02311, appendix B; neither "
        "recomputation nor padding, vision towers or adapters), by their time, by what the devices can do at most",
        "the peak of the devices is known; `patches.json` says from where, or why not",
    ),
    Metric(
        "throughput/weight_bytes", "bytes", "what was sent to all rollout processes", "a rollout of its own processes"
    ),
    Metric("memory/training_peak_bytes", "bytes", "the most that a training rank had allocated in the step"),
    Metric("memory/offloaded_bytes", "bytes", "what all training ranks gave back", _OFFLOAD),
    Metric("memory/rollout_peak_bytes", "bytes", "the most that a rollout process had allocated", _SLEEP),
    Metric("memory/asleep_bytes", "bytes", "what all rollout processes gave back", _SLEEP),
)
"""In the order of the reference, ``docs/reference/metrics.md``. A loss of one's own writes what it returns."""
