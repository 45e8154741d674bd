"""The table of metrics that a run writes with every engine; an engine may add its own (``EngineInfo.metrics``).

After a change, run ``python -m anytron.record.tracking.metric_table docs/reference/metrics.md``: a test compares that
file with this table.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from anytron.base.components import TRAINING_ENGINES, component_names, engine_info
from anytron.base.metric import Metric

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


_CORRECTED = "`algorithm.importance_correction` is `measured`, `truncated` or `masked`, also by itself"
_SUPERVISED = "`algorithm.name` is `sft`"
_TURNS = "`environment` is given"
_ENDPOINT = "`rollout.endpoint` or an agent is given"
_CRITIC = "`critic` is given"
_OFFLOAD, _SLEEP = "`engine.offload` names something", "`rollout.sleep`"
_STALE = "`rollout.max_staleness` is above 0"
_VALIDATION, _PROMPTS = "`validation` is given", "there are two prompts or more"
_END = "end of its confidence interval: 95 %, bootstrap over prompts; see [validate](../how-to/validate.md)"
_CLIPS = "`algorithm.loss` is `ppo_clip`, `gspo` or `gspo_token`"
_PENALTY = "`algorithm.kl_coefficient` is above 0"

_DYNAMIC = "`algorithm.dynamic_sampling`"

METRICS = (
    Metric("step", "steps", "the training step, counted from 1"),
    Metric(
        "reward/mean",
        "",
        "mean reward of the step's samples, the weighted sum of all reward functions; like all metrics of `reward` and "
        "`response`, it covers all samples that were drawn, trained on or not",
    ),
    Metric("reward/std", "", "standard deviation of the rewards of the step's samples"),
    Metric(
        "reward/group_std_zero_fraction",
        "fraction",
        "groups of responses to one prompt whose rewards are all equal: they teach GRPO nothing",
        "`rollout.samples_per_prompt` is above 1",
    ),
    Metric(
        "reward/groups_without_signal",
        "groups",
        "groups from which rewards teach nothing: none of their samples is trained on, or, where `algorithm.advantage` "
        "compares the responses to a prompt and there is no `teacher`, all samples that are trained on have equal "
        "rewards",
    ),
    Metric(
        "reward/steps_without_signal",
        "steps",
        "steps in a row, up to this one, that had no token to train on and were skipped; "
        "`algorithm.max_steps_without_signal` of them end the run",
    ),
    Metric("reward/NAME/mean", "", "mean of one reward function, without its weight", "several reward functions"),
    Metric("reward/NAME/failed", "samples", "samples that a reward function failed for"),
    Metric(
        "reward/overlong_penalty",
        "",
        "mean of what is added to rewards for length, 0 or less; not in `reward/mean`",
        "`algorithm.overlong_buffer` is given",
    ),
    Metric("sampling/rounds", "rounds", "how often prompts were drawn for the step", _DYNAMIC),
    Metric("sampling/groups_drawn", "groups", "prompts that were drawn and answered, in all rounds", _DYNAMIC),
    Metric("sampling/groups_dropped", "groups", "drawn groups without signal, which are not trained on", _DYNAMIC),
    Metric("sampling/no_signal_fraction", "fraction", "share of the drawn groups that were dropped", _DYNAMIC),
    Metric(
        "sampling/groups_missing",
        "groups",
        "`data.prompts_per_step` minus the step's groups: above 0 if `algorithm.dynamic_sampling_rounds` were too few",
        _DYNAMIC,
    ),
    Metric("response/length_mean", "tokens", "mean length of responses, without what an environment wrote"),
    Metric("response/length_max", "tokens", "the longest response of the step"),
    Metric("response/truncated_fraction", "fraction", "responses that ended at the length limit, without an end token"),
    Metric("response/empty_fraction", "fraction", "responses without a token"),
    Metric(
        "response/unknown_tokens",
        "tokens",
        "response tokens that the tokenizer does not have, because the model's vocabulary is larger; rewards do not "
        "see them",
    ),
    Metric(
        "validation/NAME/mean@N",
        "",
        "mean reward of the N responses to each prompt of a validation set, averaged over prompts",
        _VALIDATION,
    ),
    Metric("validation/NAME/mean@N/low", "", f"lower {_END}", _PROMPTS),
    Metric("validation/NAME/mean@N/high", "", f"upper {_END}", _PROMPTS),
    Metric(
        "validation/NAME/pass@K",
        "fraction",
        "probability that at least one of K responses to a prompt passes, estimated without bias",
        "K is in `pass_at`",
    ),
    Metric("validation/NAME/pass@K/low", "fraction", f"lower {_END}", _PROMPTS),
    Metric("validation/NAME/pass@K/high", "fraction", f"upper {_END}", _PROMPTS),
    Metric("validation/NAME/response/length_mean", "tokens", "as `response/length_mean`", _VALIDATION),
    Metric("validation/NAME/response/truncated_fraction", "fraction", "as `response/truncated_fraction`", _VALIDATION),
    Metric(
        "validation/NAME/reward/NAME/mean",
        "",
        "mean of one reward of a validation set, without its weight",
        "several rewards",
    ),
    Metric(
        "validation/NAME/failed",
        "samples",
        "responses that were dropped, as a reward or environment failed",
        _VALIDATION,
    ),
    Metric(
        "validation/NAME/loss",
        "nats",
        "mean negative log-prob of the response tokens of a validation set",
        f"{_VALIDATION}, and {_SUPERVISED}",
    ),
    Metric("validation/time_s", "seconds", "the whole validation, all sets", _VALIDATION),
    Metric("environment/failed", "samples", "samples whose environment failed", _TURNS),
    Metric(
        "environment/conversations_mean",
        "",
        "mean number of conversations of a sample; only agents hold several, and then metrics of turns and of "
        "observations cover the last one",
        _TURNS,
    ),
    Metric("environment/turns_mean", "turns", "mean number of the model's turns", _TURNS),
    Metric("environment/turns_max", "turns", "the most turns of a sample", _TURNS),
    Metric("environment/observation_tokens_mean", "tokens", "mean length of what the environment wrote", _TURNS),
    Metric("endpoint/answered", "requests", "requests of agents and clients that the model answered", _ENDPOINT),
    Metric(
        "endpoint/refused",
        "requests",
        "requests that were refused, such as those with a history that their session has not recorded",
        _ENDPOINT,
    ),
    Metric("endpoint/aborted", "requests", "requests that their client gave up", _ENDPOINT),
    Metric("environment/metrics/NAME", "", "mean of a metric that the environment itself reports", _TURNS),
    Metric("loss/total", "", "the loss whose gradient was taken"),
    Metric("loss/policy", "", "policy-gradient part of the loss: what `algorithm.loss` computes"),
    Metric("loss/metrics/NAME", "", "what a loss of your own returns as a metric", "it returns some"),
    Metric(
        "loss/nll",
        "nats",
        "mean negative log-prob of the examples' response tokens, whatever `algorithm.aggregation` is",
        _SUPERVISED,
    ),
    Metric("loss/kl", "nats", "KL part of the loss, without its coefficient, averaged as `algorithm.aggregation` says"),
    Metric("policy/entropy", "nats", "mean entropy of the next-token distribution over response tokens"),
    Metric("policy/ratio_mean", "", "mean probability ratio of the policy to the policy before the step's updates"),
    Metric("policy/kl", "nats", "mean KL divergence of a response token from the reference model", _PENALTY),
    Metric(
        "policy/teacher_kl",
        "nats",
        "mean reverse KL divergence of a response token from the teacher before the step's updates, estimated (k1)",
        "`teacher` is given",
    ),
    Metric("policy/clip_fraction", "fraction", "response tokens whose gradient was clipped away", _CLIPS),
    Metric(
        "policy/capped_fraction",
        "fraction",
        "response tokens whose weight was clipped; they keep their gradient",
        "`algorithm.loss` is `cispo`",
    ),
    Metric(
        "policy/rollout_mismatch",
        "fraction",
        "response tokens whose log-prob in training is not the rollout's to the bit: 0, because another value ends the "
        "run",
        "`engine.on_policy` is `bitwise`",
    ),
    Metric("kl/coefficient", "", "the coefficient of the KL penalty in this step", "`algorithm.kl_target`"),
    Metric(
        "rollout/log_prob_abs_diff",
        "nats",
        "mean absolute difference of the log-probs that rollout and training compute for a response token; see "
        "[bad numbers](../how-to/debug-bad-numbers.md)",
    ),
    Metric(
        "rollout/log_prob_abs_diff_max",
        "nats",
        "the largest absolute difference of rollout's and training's log-prob of a token",
        _CORRECTED,
    ),
    Metric("rollout/log_prob_correlation", "", "Pearson's correlation of rollout and training log-probs", _CORRECTED),
    Metric(
        "rollout/kl", "nats", "KL divergence of the policy that drew the tokens from training's, estimated", _CORRECTED
    ),
    Metric(
        "rollout/importance_mean",
        "",
        "mean importance weight of a token, its own or its response's (`algorithm.importance_level`), before limits",
        _CORRECTED,
    ),
    Metric("rollout/importance_max", "", "the largest importance weight of a token, before limits", _CORRECTED),
    Metric(
        "rollout/importance_clip_fraction",
        "fraction",
        "tokens whose weight is above `algorithm.importance_cap`, or `masked` below `algorithm.importance_floor`",
        _CORRECTED,
    ),
    Metric(
        "rollout/effective_sample_size",
        "fraction",
        "Kish's effective sample size of the weighted tokens, divided by their number",
        _CORRECTED,
    ),
    Metric("rollout/sequence_importance_mean", "", "mean probability ratio of whole responses", _CORRECTED),
    Metric("rollout/sequence_importance_max", "", "the largest probability ratio of a whole response", _CORRECTED),
    Metric("rollout/age_mean", "updates", "mean age of the weights that a token was drawn with", _STALE),
    Metric("rollout/age_max", "updates", "the oldest weights of the step", _STALE),
    Metric("grad_norm", "", "norm of the whole gradient before clipping (`optimizer.clip_grad`)"),
    Metric("lr", "", "learning rate of the update"),
    Metric(
        "update/skipped",
        "updates",
        "updates that were left out: a number was not finite, or there was nothing to train on",
    ),
    Metric("critic/loss", "", "half the squared error of the values", _CRITIC),
    Metric("critic/value_mean", "", "mean value of response tokens", _CRITIC),
    Metric("critic/return_mean", "", "mean return of response tokens", _CRITIC),
    Metric("critic/clip_fraction", "fraction", "tokens whose value was clipped (`critic.clip_value`)", _CRITIC),
    Metric("critic/explained_variance", "", "part of the returns' variance that values explain, at most 1", _CRITIC),
    Metric("critic/grad_norm", "", "as `grad_norm`, of the critic", _CRITIC),
    Metric("critic/lr", "", "as `lr`, of the critic", _CRITIC),
    Metric("critic/update/skipped", "updates", "as `update/skipped`, of the critic", _CRITIC),
    Metric("time/checkpoint_s", "seconds", "saving a checkpoint, as part of the step"),
    Metric("data/epochs", "epochs", "examples drawn so far, divided by the number of examples", _SUPERVISED),
    Metric("time/data_s", "seconds", "drawing examples", _SUPERVISED),
    Metric("time/rollout_s", "seconds", "waiting for responses"),
    Metric("time/sync_s", "seconds", "sending the weights to the rollout", "a rollout with its own processes"),
    Metric("time/validation_s", "seconds", "validating the policy as it was before the step", _VALIDATION),
    Metric("time/reward_s", "seconds", "scoring responses"),
    Metric("time/score_s", "seconds", "log-probs, values and advantages before the first update"),
    Metric("time/update_s", "seconds", "all updates of the step"),
    Metric("time/step_s", "seconds", "the whole step"),
    Metric("throughput/tokens_per_s", "tokens/second", "tokens of prompts and responses, divided by the step's time"),
    Metric(
        "throughput/tokens_per_s_per_device",
        "tokens/second",
        "`throughput/tokens_per_s`, divided by the number of devices of training ranks and of rollout replicas that "
        "have their own",
    ),
    Metric(
        "throughput/mfu",
        "fraction",
        "model FLOP/s utilization of updates: the operations that they need (arXiv:2204.02311, appendix B; without "
        "recomputation, padding, vision towers and adapters), divided by their time and by the devices' peak",
        "the peak of the devices is known; `patches.json` says from where, or why not",
    ),
    Metric(
        "throughput/weight_bytes",
        "bytes",
        "size of the weights that were sent to all rollout processes",
        "a rollout with its own processes",
    ),
    Metric("memory/training_peak_bytes", "bytes", "the most that a training rank had allocated in the step"),
    Metric("memory/offloaded_bytes", "bytes", "device memory that all training ranks freed", _OFFLOAD),
    Metric("memory/rollout_peak_bytes", "bytes", "the most that a rollout process had allocated", _SLEEP),
    Metric("memory/asleep_bytes", "bytes", "device memory that all rollout processes freed while they slept", _SLEEP),
)
"""All metrics, in the order of the reference, ``docs/reference/metrics.md``."""


HEADING = """# Metrics

<!-- Generated from core/anytron/record/tracking/metric_table.py and the descriptions of engines by
`python -m anytron.record.tracking.metric_table docs/reference/metrics.md`. -->

Each step of a run is one line of `metrics.jsonl` in `trainer.output_dir`: a JSON object of these keys. Numbers of
updates are averages over the step's updates that were not skipped. A loss of your own (`algorithm.loss`) returns its
own metrics, below `loss/metrics/`, instead of the metrics of the built-in loss. `NAME` stands for a name, other
capitals for a number.

Each validation is one line of `validation.jsonl`: `step`, the number of completed training steps, and the keys below
`validation/`.
"""
DISTRIBUTION = "anytron"
"""The reference has the metrics of this distribution's engines, whatever else is installed."""

_UPDATES = "step and update"


def render() -> str:
    """Return the reference page of all metrics, as Markdown."""
    return "\n".join([HEADING, *_sections()]).rstrip() + "\n"


def _sections() -> Iterator[str]:
    sections: dict[str, list[Metric]] = {}
    for metric in METRICS:
        head, _, rest = metric.name.partition("/")
        sections.setdefault(head if rest and head != "update" else _UPDATES, []).append(metric)
    for head, metrics in sections.items():
        yield from _table(head, metrics)
    for engine in component_names(TRAINING_ENGINES, DISTRIBUTION):
        metrics = list(engine_info(TRAINING_ENGINES, engine, "engine.name").metrics)
        if metrics:
            yield from _table(f"Of the engine {engine}", metrics)


def _table(title: str, metrics: Iterable[Metric]) -> Iterator[str]:
    yield f"## {title}\n"
    yield "| metric | unit | meaning | only if |"
    yield "|---|---|---|---|"
    for metric in metrics:
        yield f"| `{metric.name}` | {metric.unit} | {metric.meaning} | {metric.when} |"
    yield ""


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(render(), encoding="utf-8")
