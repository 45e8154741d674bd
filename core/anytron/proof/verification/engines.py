"""The engines that the checks share. What a check has ended starts anew for the next one, unless it cannot."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anytron.base.errors import AnytronError
from anytron.base.temporary import WEIGHTS, PrivateDirectory
from anytron.run.preflight.capabilities import compares_weights
from anytron.run.trainer.weight_transfer import WeightTransfer
from anytron.run.trainer.workers import TrainingWorkers, kernel_suppliers, start_workers

if TYPE_CHECKING:
    from anytron.config.schema import RunConfig
    from anytron.run.rollout.pool import RolloutPool
    from anytron.run.trainer.reward_model import RewardModelRanks
    from anytron.workers.executor.protocol import Executor


class Engines:
    """The training engine, the rollout engine and the reward model.

    Args:
        config: The run.
        executor: Starts their processes; the constructor waits for the training ranks.

    Attributes:
        kernels: The plugins that supplied each kernel of the configured training engine.
    """

    _trainer: TrainingWorkers
    _rollout: RolloutPool
    _reward_model: RewardModelRanks | None
    _built: RunConfig | None  # what the training engine was built with; None once its weights are others
    _has_weights: bool  # the rollout engine

    def __init__(self, config: RunConfig, executor: Executor) -> None:
        self._config = config
        self._executor = executor
        self._failure: AnytronError | None = None  # of a start
        self._start()
        self.kernels = kernel_suppliers(self._trainer.describe())

    def trainer(self, config: RunConfig | None = None) -> TrainingWorkers:
        """The training ranks, with the weights that the run begins with.

        Args:
            config: Another configuration of as many ranks; None = the run's.
        """
        config = self._config if config is None else config
        self._start_if_ended()
        if self._built != config:
            self._built = None
            self._trainer.group.rebuild(config)
            self._trainer = TrainingWorkers.of(self._trainer.group)
            self._built = config
        return self._trainer

    def trainer_to_update(self, config: RunConfig | None = None) -> TrainingWorkers:
        """The same for a check that changes the weights: whoever comes next gets others."""
        trainer = self.trainer(config)
        self._built = None
        return trainer

    def rollout(self) -> RolloutPool:
        """The rollout engine, with the training engine's weights."""
        self._start_if_ended()
        if not self._has_weights:
            self.give_weights()
        return self._rollout

    def reward_model(self) -> RewardModelRanks:
        """The ranks of the run's reward model."""
        self._start_if_ended()
        assert self._reward_model is not None
        return self._reward_model

    def give_weights(self) -> None:
        """Give the rollout engine the weights, and compare those that it holds then, if it can say which they are.

        Raises:
            TransferError: They are others.
        """
        trainer = self.trainer()
        with PrivateDirectory(WEIGHTS) as exchange:
            transfer = WeightTransfer.from_config(self._config, self._executor, exchange.path, lambda _: None)
            self._rollout.load_weights(transfer.of(trainer, compared=compares_weights(self._config)))
        self._has_weights = True

    def close(self) -> None:
        """Close both engines and end their processes, whose memory another check needs."""
        self._executor.close()

    def _start(self) -> None:
        self._trainer, self._rollout, self._reward_model = start_workers(self._executor, self._config)
        self._built, self._has_weights = self._config, False

    def _start_if_ended(self) -> None:
        if self._failure is not None:
            raise self._failure
        judge = self._reward_model
        if self._trainer.group.ended or self._rollout.failed or (judge is not None and judge.group.ended):
            self._executor.end()
            try:
                self._start()
            except AnytronError as error:
                self._failure = error
                raise
