"""Make the checks of ``anytron verify``, in their order."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from anytron.config.running import ParallelSection
from anytron.proof.checks import Check, Inapplicable, Report, make
from anytron.proof.shrinking.weights import draw_telling_values
from anytron.proof.verification import experts, rates, roles, updates
from anytron.proof.verification.comparisons import (
    compare_logits,
    compare_observations,
    compare_sampled,
    compare_samples,
    compare_token_outputs,
    measured,
)
from anytron.proof.verification.conversations import check_conversations
from anytron.proof.verification.empty_shares import check_empty_shares
from anytron.proof.verification.engines import (
    MAX_NEW_TOKENS,
    first_sequences,
    observe,
    observe_on_one_rank,
    observe_token_outputs,
)
from anytron.proof.verification.epochs import check_epochs
from anytron.proof.verification.frequencies import check_frequencies
from anytron.proof.verification.gradients import compare_recomputed, own_gradients
from anytron.proof.verification.logits import logits_of_transformers
from anytron.proof.verification.long_sequences import long_sequence
from anytron.proof.verification.objective import check_advantages, check_loss
from anytron.proof.verification.prediction import check_prediction, trains_modules
from anytron.proof.verification.resuming import check_resume
from anytron.proof.verification.saved import check_saved
from anytron.proof.verification.shared import ExecutorMaker, Shared, check, require
from anytron.proof.verification.sums import check_sums
from anytron.proof.verification.weights import compare_weights, stored_weights
from anytron.run.preflight.capabilities import can_save_checkpoints, compares_weights, shows_gradients
from anytron.run.preflight.prepare import prepare
from anytron.run.trainer.models import model_directory, write_random_model

if TYPE_CHECKING:
    from collections.abc import Iterator

    from anytron.base.results import Result
    from anytron.config.schema import RunConfig
    from anytron.device.loading import Session
    from anytron.proof.checks import Watcher


def verify(config: RunConfig, session: Session, make_executor: ExecutorMaker, watcher: Watcher) -> Report:
    """Make all checks of ``anytron verify``.

    Args:
        config: Configuration, complete and checked; the checks write into its ``trainer.output_dir``.
        session: Plugins and platform of the driver.
        make_executor: Makes an executor; it is called again for a layout of another size, which needs other processes.
        watcher: Receives the progress and each result.

    Returns:
        One result for each of :data:`CHECKS`, in that order, and the suppliers of the kernels. If an engine raises an
        error or a process dies during a check, that check fails. Checks that need the failed check's values are
        skipped; all others are made, in new processes if necessary.

    Raises:
        AnytronError: The prompts are not usable, or the engines do not start.
    """
    watcher.begins("preparing prompts and weights")
    changed: dict[str, object] = {"quantization": None}  # rounding would hide differences between the engines
    if config.supervised:  # it says nothing of responses
        changed["max_new_tokens"] = MAX_NEW_TOKENS
    rollout, algorithm = config.rollout.model_copy(update=changed), config.corrected_algorithm
    config = config.model_copy(update={"rollout": rollout, "algorithm": algorithm})
    prepared = prepare(config)
    write_random_model(config, prepared.tokenizer, draw_telling_values)
    random = roles.with_drawn_head(config)
    config = updates.without_dropout(random)
    watcher.begins("starting the engines")
    with make_executor(config, session) as executor:
        run = _Run(config, random, session, make_executor, executor, prepared)
        results = [*make(CHECKS, run.results, watcher)]
        return Report(results, {"kernels": dict(run.kernels)})


class _Run(Shared):
    """The checks."""

    @property
    def _has_agent(self) -> bool:
        return self._config.environment is not None and self._config.environment.is_agent

    def results(self, check: Check) -> Iterator[Result]:
        """Make a check."""
        self._check = check.name
        for result in check.results(self, check.name):
            if result.status == "failed":
                self._failed.append(check.name)
            yield result

    @check("prompt-order")
    def prompt_order(self, name: str) -> Result:
        """Look at the order of prompts in two epochs, and after a resume."""
        return check_epochs(name, self._config, self._prepared.sampler)

    @check("advantages")
    def advantages(self, name: str) -> Result:
        """Compare the advantages of made-up responses with their definition."""
        require(not self._config.supervised, "the run has no rewards")
        return check_advantages(name, self._config)

    @check("loss")
    def loss(self, name: str) -> Result:
        """Compare the loss of made-up responses, and its gradient, with its definition."""
        return check_loss(name, self._config)

    @check("mask-conformance")
    def mask_conformance(self, name: str) -> Result:
        """Compare the platform's masks and attention kernels with their definition."""
        conformance = self._engines.trainer().attention_conformance()
        if conformance is None:
            raise Inapplicable("the training engine does not offer this check")
        return measured(name, conformance.difference, conformance.tolerance, conformance.detail)

    @check("export-equals-import")
    def export_equals_import(self, name: str) -> Result:
        """Compare exported weights with the checkpoint, bit for bit, and give them to the rollout engine.

        If the rollout engine can return its weights, they are compared too.
        """
        from safetensors.torch import load_file

        file = Path(self._config.trainer.output_dir) / "verified.safetensors"
        self._engines.trainer().export_weights(str(file))
        self._engines.give_weights()
        exported = load_file(file)
        file.unlink()
        held = "which the rollout engine holds" if compares_weights(self._config) else "not compared with the rollout"
        detail = f"{len(exported)} tensors, {held}"
        return compare_weights(name, stored_weights(model_directory(self._config)), exported, detail)

    @check("saved-model")
    def saved_model(self, name: str) -> Result:
        """Write the model as a run does at its end, and compare it with the model that the run begins with."""
        return check_saved(name, self._config, self._engines.trainer(), self._prepared.tokenizer)

    @check("hf-logits")
    def hf_logits(self, name: str) -> Result:
        """Compare logits with those of transformers, computed on the host or in the rollout's process."""
        expected, place = self._their_logits()
        return compare_logits(name, self._config.model.dtype, expected, self._forward().logits, place)

    @check("hf-log-probs")
    def hf_log_probs(self, name: str) -> Result:
        """Compare the log-prob kernel's results with those from the logits of ``hf-logits``, at two temperatures."""
        first = first_sequences(self._trajectories().batch)
        outputs = self._forward().by_temperature
        return compare_token_outputs(name, self._config.model.dtype, self._their_logits()[0], first, outputs)

    @check("long-sequence")
    def long_sequence(self, name: str) -> Result:
        """Compare log-probs and entropies of a sequence as long as the run's longest with those of transformers."""
        made = long_sequence(self._config, self._trajectories().batch)
        self._forward()
        logits, place = logits_of_transformers(self._config, self._session.platform, self._engines, made)
        found = observe_token_outputs(self._engines.trainer(), self._config, made.batch)
        result = compare_token_outputs(name, self._config.model.dtype, logits, made.batch, found)
        return replace(result, detail=f"{result.detail}; {place}")

    @check("hf-gradients")
    def hf_gradients(self, name: str) -> Result:  # noqa: ARG002 - as all checks
        """Compare the gradient of each parameter with that of transformers, which computes in this process."""
        self._require_gradients()
        self._forward()  # without a forward pass there is none back
        return self._after(("hf-logits", "hf-log-probs"), self._gradients())

    @check("gradients-add-up")
    def gradients_add_up(self, name: str) -> Result:
        """Compare the gradient of many micro-batches with the sum that float32 makes of their gradients."""
        self._require_gradients()
        self._forward()
        self._gradients()
        return check_sums(name, self._config, self._engines.trainer(), self._trajectories().batch)

    @check("multi-token-prediction")
    def multi_token_prediction(self, name: str) -> Result:
        """Compare the loss of multi-token prediction modules, and its gradients, with those of their definition."""
        require(trains_modules(self._config), "the run trains no multi-token prediction modules")
        self._require_gradients()
        self._gradients()
        return check_prediction(name, self._config, self._engines.trainer_to_update(), self._trajectories().batch)

    @check("balance-loss")
    def balance_loss(self, name: str) -> Result:
        """Compare the load-balancing loss of routers, and its gradients, with their definition."""
        experts.require_experts(self._config, exact=True)
        self._require_gradients()
        self._forward()
        self._gradients()
        return experts.check_balance(name, self._config, self._engines.trainer_to_update(), self._trajectories().batch)

    @check("router-bias")
    def router_bias(self, name: str) -> Result:
        """Compare how updates move the biases that choose experts with the experts' numbers of tokens."""
        experts.require_experts(self._config, exact=False)
        self._forward()
        return experts.check_biases(name, self._config, self._engines.trainer_to_update(), self._trajectories().batch)

    @check("critic-values")
    def critic_values(self, name: str) -> Result:  # noqa: ARG002 - as all checks
        """Compare the critic's exported weights with its initial ones, and its values with transformers'."""
        require(self._config.critic, "the run has no critic")
        return self._values()

    @check("critic-gradients")
    def critic_gradients(self, name: str) -> Result:
        """Compare the gradient of each of the critic's parameters, value head included, with that of transformers."""
        require(self._config.critic, "the run has no critic")
        self._require_gradients()
        self._values()  # without a forward pass there is none back
        batch = self._trajectories().batch
        result = roles.check_value_gradients(name, self._config, self._engines.trainer(), batch)
        return self._after(("critic-values",), result)

    @check("teacher-log-probs")
    def teacher_log_probs(self, name: str) -> Result:
        """Compare the teacher's log-probs and entropies with those of transformers, at two temperatures."""
        require(self._config.teacher, "the run has no teacher")
        return roles.check_teacher(name, self._config, self._engines.trainer(), self._trajectories().batch)

    @check("reward-model-scores")
    def reward_model_scores(self, name: str) -> Result:
        """Compare the reward model's scores of responses with those of transformers' classifier."""
        require(self._config.reward_model, "the run has no reward model")
        return roles.check_reward_model(name, self._config, self._engines.reward_model(), self._trajectories().batch)

    @check("optimizer-update")
    def optimizer_update(self, name: str) -> Result:
        """Compare how one update changes each weight with how torch's optimizer changes it."""
        self._require_gradients()
        wanted = updates.with_decaying_rate(self._config)
        config = self._adapted(
            wanted, "", lambda one: (one.optimizer, one.critic), "the check needs a higher lr and weight decay"
        )
        self._forward()
        self._gradients()
        return updates.check_optimizer(
            name, config, self._engines.trainer_to_update(config), self._trajectories().batch
        )

    @check("learning-rates")
    def learning_rates(self, name: str) -> Result:
        """Compare the learning rate of each update of a short run with the configured schedule's definition."""
        config = self._adapted(
            rates.shortened(self._config), "trainer", lambda one: one.trainer.total_steps, "the check needs a short run"
        )
        self._forward()
        if shows_gradients(self._config):
            self._gradients()
        return rates.check_rates(name, config, self._engines.trainer_to_update(config), self._trajectories().batch)

    @check("resumed-equals-continued")
    def resumed_equals_continued(self, name: str) -> Result:
        """Compare the update after a resume from a checkpoint with the same update without the interruption."""
        require(can_save_checkpoints(self._config), f"the engine {self._config.engine.name} saves no checkpoints")
        wanted = updates.with_decaying_rate(self._config)
        config = self._adapted(
            wanted, "", lambda one: (one.optimizer, one.critic), "the check needs a higher lr and weight decay"
        )
        self._forward()
        if shows_gradients(self._config):
            self._gradients()
        batch = self._trajectories().batch
        return check_resume(name, config, lambda: self._engines.trainer_to_update(config), batch)

    @check("adapters-equal-merged")
    def adapters_equal_merged(self, name: str) -> Result:
        """Compare adapters that are not 0 with transformers' model of the merged weights."""
        require(self._config.model.lora, "the run trains no adapters (model.lora)")
        wanted = updates.with_visible_update(self._config)
        config = self._adapted(wanted, "optimizer", lambda one: one.optimizer, "the check needs a higher lr")
        self._forward()
        batch = self._trajectories().batch
        result = updates.check_adapters(name, config, self._engines.trainer_to_update(config), batch)
        return self._after(("hf-gradients",), result)

    @check("rollout-equals-training")
    def rollout_equals_training(self, name: str) -> Result:
        """Compare log-probs of sampled tokens: the rollout engine's and the training engine's."""
        batch = self._trajectories().batch
        own = self._forward().by_temperature[self._config.rollout.temperature].log_probs
        assert own is not None
        return compare_sampled(name, self._config.model.dtype, batch, own, f"of {batch.num_sequences} responses")

    @check("conversations")
    def conversations(self, name: str) -> Result:
        """Hold conversations with a made-up environment; compare tokens with their definition, and log-probs."""
        require(self._config.environment, "the run has no environment")
        require(not self._has_agent, "the run's environment is an agent, which writes all messages")
        prompts = self._trajectories().prompts
        self._forward()
        engines = self._engines
        return check_conversations(name, self._config, self._prepared, engines.rollout(), engines.trainer(), prompts)

    @check("samples-of-a-prompt")
    def samples_of_a_prompt(self, name: str) -> Result:
        """Look whether the samples of each prompt differ."""
        rollout = self._config.rollout
        narrowed = rollout.top_k > 0 or rollout.top_p < 1.0
        return compare_samples(name, self._trajectories().batch, narrowed=narrowed)

    @check("token-frequencies")
    def token_frequencies(self, name: str) -> Result:
        """Compare which tokens are drawn with their probabilities and with what the sampling parameters allow."""
        prompts = self._trajectories().prompts
        logits, engines = self._forward().logits, self._engines
        own = self._config, self._prepared, engines.rollout(), engines.trainer()
        return check_frequencies(name, *own, prompts, logits)

    @check("rollout-follows-updates")
    def rollout_follows_updates(self, name: str) -> Result:
        """Update the weights, give them to the rollout engine, answer the same prompts again, and compare log-probs."""
        wanted = updates.with_visible_update(self._config)
        config = self._adapted(wanted, "", lambda one: one.optimizer, "the check needs a higher lr")
        batch = self._trajectories().batch
        self._forward()
        if shows_gradients(self._config):
            self._gradients()
        trainer = self._engines.trainer_to_update(config)
        return updates.check_following(name, config, trainer, batch, lambda trainer: self._sampled_again(trainer).batch)

    @check("empty-shares")
    def empty_shares(self, name: str) -> Result:
        """Train on short sequences, so that some rank, stage, replica or expert has no work; compare with one pack."""
        self._forward()
        if shows_gradients(self._config):
            self._gradients()
        trainer = self._engines.trainer_to_update()
        return check_empty_shares(name, self._config, trainer, self._trajectories().batch)

    @check("packed-equals-padded")
    def packed_equals_padded(self, name: str) -> Result:
        """Compare the values of the run's sequence format with those of the other format, in the same processes."""
        other = "bshd" if self._config.engine.sequence_format == "thd" else "thd"
        engine = self._config.engine.model_copy(update={"sequence_format": other})
        wanted = self._config.model_copy(update={"engine": engine})
        config = self._adapted(
            wanted,
            "engine.sequence_format",
            lambda one: one.engine.sequence_format,
            f"{other} is not possible for this model and layout",
        )
        own, batch = self._own(), self._trajectories().batch
        found = observe(self._engines.trainer_to_update(config), config, batch)
        formats = f"{self._config.engine.sequence_format} and {other}"
        return compare_observations(name, config.model.dtype, own, found, formats)

    @check("recomputed-equals-kept")
    def recomputed_equals_kept(self, name: str) -> Result:
        """Compare the gradients of recomputed and of kept activations; dropout must be drawn again as it was."""
        if self._config.engine.recompute == "none":
            raise Inapplicable("nothing is recomputed (engine.recompute)")
        self._require_gradients()
        keeping = self._random.engine.model_copy(update={"recompute": "none"})
        wanted = self._random.model_copy(update={"engine": keeping})
        config = self._adapted(
            wanted, "engine.recompute", lambda one: one.engine.recompute, "activations cannot be kept"
        )
        self._forward()
        self._gradients()
        batch = self._trajectories().batch
        found, expected = (own_gradients(one, self._engines.trainer(one), batch) for one in (self._random, config))
        return compare_recomputed(name, config.model.dtype, found, expected)

    @check("parallel-equals-single")
    def parallel_equals_single(self, name: str) -> Result:
        """Compare with one rank that holds the whole model; the configured ranks end first, to free their memory."""
        ranks = self._config.parallel.world_size
        if ranks == 1:
            raise Inapplicable("the configured layout has one rank")
        wanted = self._config.model_copy(update={"parallel": ParallelSection()})
        config = self._adapted(
            wanted, "parallel", lambda one: one.parallel.world_size, "one rank is not possible for this model"
        )
        own, batch = self._own(), self._trajectories().batch
        self._engines.close()
        found = observe_on_one_rank(config, self._make_executor(config, self._session), batch)
        return compare_observations(name, config.model.dtype, own, found, f"{ranks} ranks and one")


CHECKS = tuple(one for one in vars(_Run).values() if isinstance(one, Check))
"""In the order of the report."""
