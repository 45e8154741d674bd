"""Make the checks of ``anytron verify``, in their order."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from anytron.components import TRAINING_ENGINES
from anytron.config.schema import ParallelSection
from anytron.errors import AnytronError, ConfigError
from anytron.executor.protocol import GroupSpec
from anytron.preflight.capabilities import compares_weights
from anytron.preflight.prepare import prepare
from anytron.temporary import WEIGHTS, PrivateDirectory
from anytron.trainer.initial_model import model_directory, write_random_model
from anytron.trainer.weight_transfer import WeightTransfer
from anytron.trainer.workers import TrainingWorkers, kernel_suppliers, start_workers
from anytron.verification.observation import WHOLE_LOGITS, Observation, observe
from anytron.verification.report import CheckResult, Report, failed, measured, skipped
from anytron.verification.tolerances import FACTORS, tolerance
from anytron.verification.trajectories import Trajectories, sample_trajectories

if TYPE_CHECKING:
    from collections.abc import Callable

    from anytron.config.schema import RunConfig
    from anytron.executor.protocol import Executor
    from anytron.hooks.types import ConfigEdit
    from anytron.plugins import Session
    from anytron.preflight.prepare import PreparedRun

    ExecutorMaker = Callable[[RunConfig, Session], Executor]

CHECKS = (
    "mask-conformance",
    "export-equals-import",
    "hf-logits",
    "rollout-equals-training",
    "packed-equals-padded",
    "parallel-equals-single",
)
"""In the order of the report."""

_OUT_OF_MEMORY = ("out of memory", "OutOfMemory")


def verify(config: RunConfig, session: Session, make_executor: ExecutorMaker, tell: Callable[[str], None]) -> Report:
    """Make all checks.

    Args:
        config: The run, complete and checked; the checks write into its ``trainer.output_dir``.
        session: The driver's plugins.
        make_executor: The executor's class: a layout of another size needs other processes.
        tell: Called with the name of the next step, for people.

    Returns:
        One result for each of :data:`CHECKS`, in that order, and the suppliers of the kernels. If an engine refuses
        something, or a process dies, the check that met it fails, and so do those that needed it.

    Raises:
        ConfigError: The configuration names something impossible or missing.
        DataError: The prompts are not usable.
    """
    tell("preparing prompts and weights")
    prepared = prepare(config)
    write_random_model(config, prepared.tokenizer)
    tell("starting the engines")
    with make_executor(config, session) as executor:
        run = _Run(config, session, make_executor, executor)
        return Report(_check(run, prepared, tell), run.kernels)


def _check(run: _Run, prepared: PreparedRun, tell: Callable[[str], None]) -> list[CheckResult]:
    results: dict[str, CheckResult] = {}

    def attempt(check: str, make: Callable[[], CheckResult]) -> None:
        tell(check)
        try:
            results[check] = make()
        except AnytronError as error:
            results[check] = failed(check, _in_words(error))

    attempt("mask-conformance", run.mask_conformance)
    attempt("export-equals-import", run.export_equals_import)
    tell("sampling responses")
    try:
        run.sample(prepared)
    except AnytronError as error:
        return [results.get(check) or failed(check, _in_words(error)) for check in CHECKS]
    attempt("hf-logits", run.hf_logits)
    attempt("rollout-equals-training", run.rollout_equals_training)
    attempt("packed-equals-padded", run.packed_equals_padded)
    attempt("parallel-equals-single", run.parallel_equals_single)
    return [results[check] for check in CHECKS]


class _Run:
    """The state that the checks share: the engines, the trajectories, and the configured engine's values.

    Attributes:
        kernels: The plugins that supplied each kernel of the configured training engine.
        trajectories: The data of the checks.
        own: The configured training engine's values.
    """

    kernels: dict[str, str]
    trajectories: Trajectories
    own: Observation

    def __init__(self, config: RunConfig, session: Session, make_executor: ExecutorMaker, executor: Executor) -> None:
        self._config = config
        self._session = session
        self._make_executor = make_executor
        self._executor = executor
        self._trainer, self._rollout = start_workers(executor, config)
        self.kernels = kernel_suppliers(self._trainer.describe())

    def sample(self, prepared: PreparedRun) -> None:
        """Sample responses, and let the configured engine compute everything on them."""
        self.trajectories = sample_trajectories(self._config, prepared, self._rollout)
        self.own = observe(self._trainer, self._config, self.trajectories.batch)

    def mask_conformance(self) -> CheckResult:
        """Compare the platform's masks and attention kernels with their definition."""
        conformance = self._trainer.attention_conformance()
        if conformance is None:
            return skipped("mask-conformance", "the training engine does not offer this check")
        return measured("mask-conformance", conformance.difference, conformance.tolerance, conformance.detail)

    def export_equals_import(self) -> CheckResult:
        """Compare exported weights with the checkpoint, bit for bit, and give them to the rollout engine.

        What the rollout engine holds then is compared with them too, if it can be.
        """
        from safetensors.torch import load_file

        file = Path(self._config.trainer.output_dir) / "verified.safetensors"
        self._trainer.export_weights(str(file))
        with PrivateDirectory(WEIGHTS) as exchange:
            transfer = WeightTransfer.from_config(self._config, self._executor, exchange.path, lambda _: None)
            compared = compares_weights(self._config)
            self._rollout.load_weights(transfer.of(self._trainer, compared=compared))
        exported = load_file(file)
        file.unlink()
        checkpoint: dict[str, torch.Tensor] = {}
        for part in sorted(model_directory(self._config).glob("*.safetensors")):
            checkpoint |= load_file(part)
        missing = sorted(checkpoint.keys() - exported.keys() - self._not_exported(checkpoint, exported))
        unknown = sorted(exported.keys() - checkpoint.keys())
        if missing or unknown:
            name = (missing or unknown)[0]
            where = "the checkpoint only" if missing else "the export only"
            detail = f"{len(missing) + len(unknown)} tensors are in one of the two; the first, {name}, is in {where}"
            return failed("export-equals-import", detail)
        worst, unequal = 0.0, []
        for name, tensor in exported.items():
            original = checkpoint[name].to(tensor.dtype)
            if not torch.equal(tensor, original):
                unequal.append(name)
                worst = max(worst, float((tensor.double() - original.double()).abs().max()))
        detail = f"{len(exported)} tensors, {'which' if compared else 'not known if'} the rollout engine holds"
        if unequal:
            detail = f"{len(unequal)} differ, the first is {unequal[0]}"
        # torch.equal compares values: zeros of different signs are equal.
        return measured("export-equals-import", worst, 0.0, detail)

    @staticmethod
    def _not_exported(checkpoint: dict[str, torch.Tensor], exported: dict[str, torch.Tensor]) -> set[str]:
        """Names of a tied weight that the checkpoint holds twice and the export once."""
        tied = {"lm_head.weight"} & checkpoint.keys() - exported.keys()
        same = [name for name in exported if name.endswith("embed_tokens.weight")]
        return {name for name in tied if any(torch.equal(checkpoint[name], checkpoint[other]) for other in same)}

    def hf_logits(self) -> CheckResult:
        """Compare logits with the rollout engine's, computed in a process that has nothing of the training engine.

        Their log-softmax, because not every engine gives the constant of each row, which means nothing.
        """
        theirs, own = torch.cat(self._rollout.logits(self.trajectories.sequences[:WHOLE_LOGITS])), self.own.logits
        width = min(theirs.shape[1], own.shape[1])
        expected, found = theirs[:, :width].log_softmax(-1), own[:, :width].log_softmax(-1)
        limit = tolerance(self._config.model.dtype, expected)
        detail = f"{len(expected)} tokens, {width} logits each, log-probs down to {float(expected.min()):.3g}"
        return measured("hf-logits", _largest(found - expected), limit, detail)

    def rollout_equals_training(self) -> CheckResult:
        """Compare log-probs of sampled tokens: the rollout engine's and the training engine's."""
        batch = self.trajectories.batch
        assert batch.rollout_log_probs is not None
        drawn = batch.response_mask
        seen, computed = batch.rollout_log_probs[drawn], self.own.log_probs[drawn]
        limit = tolerance(self._config.model.dtype, seen)
        detail = f"{int(drawn.sum())} sampled tokens of {batch.num_sequences} responses"
        return measured("rollout-equals-training", _largest(seen - computed), limit, detail)

    def packed_equals_padded(self) -> CheckResult:
        """Compare with the other sequence format, in the same processes."""
        check = "packed-equals-padded"
        if self.own.grad_norm == 0.0:  # of which no comparison would tell: 0 is equal to 0
            return failed(check, "the gradient is 0, although every response has an advantage: something cuts it off")
        other = "bshd" if self._config.engine.sequence_format == "thd" else "thd"
        wanted = self._config.model_copy(
            update={"engine": self._config.engine.model_copy(update={"sequence_format": other})}
        )
        try:
            config, edits, _ = self._session.hooks.configure(wanted)
        except ConfigError as error:
            return skipped(check, f"{other} is refused for this model and layout: {error.why or error.what}")
        if config.engine.sequence_format != other:
            return skipped(check, f"there is no {other} here: {_reasons(edits, 'engine.sequence_format')}")
        self._trainer.group.rebuild(config)
        found = observe(TrainingWorkers.of(self._trainer.group), config, self.trajectories.batch)
        return self._compare(check, found, f"{self._config.engine.sequence_format} and {other}")

    def parallel_equals_single(self) -> CheckResult:
        """Compare with one rank that holds the whole model; the configured ranks end first, to free their memory."""
        check = "parallel-equals-single"
        ranks = self._config.parallel.world_size
        if ranks == 1:
            return skipped(check, "the configured layout has one rank")
        wanted = self._config.model_copy(update={"parallel": ParallelSection()})
        try:
            config, edits, _ = self._session.hooks.configure(wanted)
        except ConfigError as error:
            return skipped(check, f"one rank is refused for this model: {error.why or error.what}")
        if config.parallel.world_size != 1:
            return skipped(check, f"one rank is not possible here: {_reasons(edits, 'parallel')}")
        self._executor.close()
        try:
            with self._make_executor(config, self._session) as executor:
                group = executor.start(GroupSpec("trainer", TRAINING_ENGINES, config.engine.name, 1))
                found = observe(TrainingWorkers.of(group), config, self.trajectories.batch)
        except AnytronError as error:
            if any(words in str(error) for words in _OUT_OF_MEMORY):
                return skipped(check, "the model does not fit on one rank")
            raise
        return self._compare(check, found, f"{ranks} ranks and one")

    def _compare(self, check: str, found: Observation, what: str) -> CheckResult:
        """Compare log-probs absolutely and the norm of the gradient relatively."""
        dtype = self._config.model.dtype
        log_probs = _largest(found.log_probs - self.own.log_probs)
        limit = tolerance(dtype, self.own.log_probs)
        relative = abs(found.grad_norm - self.own.grad_norm) / max(self.own.grad_norm, 1e-12)
        detail = f"{what}: log-probs {log_probs:.2g}, gradient norm {relative:.2g} relative"
        result = measured(check, log_probs, limit, detail)
        # Gradients add up the differences of the forward passes: we allow ten times their factor.
        if relative > 10 * FACTORS[dtype]:
            return failed(check, f"{detail}; the limit is {10 * FACTORS[dtype]:.2g}")
        return result


def _reasons(edits: list[tuple[str, ConfigEdit]], key: str) -> str:
    """Return the reasons of the edits at and below a key."""
    concerned = [(plugin, edit) for plugin, edit in edits if f"{edit.key}.".startswith(f"{key}.")]
    return "; ".join(f"{plugin} sets {edit.key} to {edit.value!r}: {edit.reason}" for plugin, edit in concerned)


def _largest(values: torch.Tensor) -> float:
    return float(values.abs().max()) if values.numel() else 0.0


def _in_words(error: AnytronError) -> str:
    return " ".join(part for part in (error.what, error.why) if part)
