"""One model in training: gradient buffers, optimizer, schedule, and updates. Knows no way of building a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from anytron.errors import EngineError
from anytron_megatron.training import parallel
from anytron_megatron.training.optimizer import build_optimizer, wrap_for_training
from anytron_megatron.training.schedule import ModelChunk, run_micro_batches

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from anytron.algorithms.losses import LossOutputs
    from anytron.batch import RaggedBatch
    from anytron.config.schema import OptimizerSection
    from anytron.traits import ParallelSizes
    from anytron_megatron.training.micro_batch import BatchPreparer
    from anytron_megatron.training.schedule import Reader, Surroundings

    Weigh = Callable[..., LossOutputs]

NOT_FINITE = "in local grad norm"
"""What Megatron says of a NaN in a gradient buffer (megatron/core/distributed/param_and_grad_buffer.py,
``check_grads``), in a RuntimeError before the ranks exchange gradients."""


class TrainedModel:
    """A model that an optimizer updates.

    Args:
        chunks: The model on this rank, its modules as they were built, with what is not to be trained frozen.
        preparer: Makes model inputs of a micro-batch.
        optimizer: The optimizer's configuration.
        key: Where that stands in the run's configuration, for errors.
        dtype: Element type of the parameters; with bfloat16 the optimizer keeps float32 copies.
        distributed_optimizer: Share the optimizer's state between data-parallel ranks.
        steps: Training steps of the whole run.
        updates_per_step: Updates in each.
        sizes: The parallel sizes.

    Attributes:
        chunks: The same chunks, each module in its data-parallel wrapper.
        updates: Updates done.
    """

    def __init__(
        self,
        chunks: Sequence[ModelChunk],
        preparer: BatchPreparer,
        optimizer: OptimizerSection,
        *,
        key: str = "optimizer",
        dtype: torch.dtype,
        distributed_optimizer: bool,
        steps: int,
        updates_per_step: int,
        sizes: ParallelSizes,
    ) -> None:
        wrapped = wrap_for_training([chunk.module for chunk in chunks], distributed_optimizer=distributed_optimizer)
        self.chunks = [ModelChunk(module, chunk.head) for module, chunk in zip(wrapped, chunks, strict=True)]
        self.updates = 0
        self._preparer = preparer
        self._key = key
        self._sizes = sizes
        self._optimizer, self._scheduler = build_optimizer(
            optimizer,
            wrapped,
            dtype=dtype,
            distributed_optimizer=distributed_optimizer,
            steps=steps,
            updates_per_step=updates_per_step,
        )

    def update(
        self,
        micro_batches: Sequence[RaggedBatch],
        weigh: Weigh,
        *,
        around: Callable[[float], Surroundings] | None = None,
        read: Reader | None = None,
    ) -> Mapping[str, float] | None:
        """Do one optimizer update on this copy's share of a mini-batch. A collective.

        Args:
            micro_batches: The same number on every rank.
            weigh: Called on the last stage with each micro-batch's values and the micro-batch, on their device;
                returns its part of the loss and of the metrics. The values are log-probs and entropies,
                float32 ``[T]``, token coordinates, and what multi-token prediction adds to them; with ``read``
                what that gives.
            around: Given what Megatron divides gradients by (micro-batches of a copy times copies), makes what
                goes around forward passes (:func:`anytron_megatron.training.schedule.run_micro_batches`).
            read: Brings the last stage's output back to tokens, as in ``run_micro_batches``.

        Returns:
            On reporting ranks: the parts' metrics, added up, ``grad_norm`` and ``lr``. None elsewhere.

        Raises:
            EngineError: The gradients are not finite; the weights are as before.
        """
        for chunk in self.chunks:
            chunk.module.train()
            chunk.module.zero_grad_buffer()
        self._optimizer.zero_grad()
        # Megatron divides by the number of micro-batches and averages over data-parallel ranks; the
        # loss is normalised over the whole mini-batch already (RaggedBatch.loss_weights).
        factor = len(micro_batches) * self._sizes.data

        def consume(*given: Any) -> tuple[Tensor, Mapping[str, Tensor]]:
            *values, batch = given
            outputs = weigh(*values, batch.to(values[0].device))
            return outputs.loss * factor, outputs.metrics

        try:
            parts = run_micro_batches(
                self.chunks,
                micro_batches,
                self._preparer,
                consume,
                forward_only=False,
                around=None if around is None else around(factor),
                read=read,
            )
        except RuntimeError as error:
            if NOT_FINITE not in str(error):
                raise
            raise EngineError(
                "The gradients are not finite.",
                where=f"update {self.updates + 1}",
                why=str(error),
                fix=f"lower {self._key}.lr, set {self._key}.warmup_steps, or try model.dtype=float32; "
                "metrics.jsonl shows what led to it",
            ) from error
        successful, grad_norm, _ = self._optimizer.step()
        if not successful:
            raise EngineError("The optimizer refused the gradients.", where="update", why="they are not finite")
        lr = self._scheduler.get_lr(self._optimizer.param_groups[0])
        self._scheduler.step(increment=1)
        self.updates += 1
        if not parallel.topology().reports:
            return None
        names = parts[0].keys()
        sums = torch.stack([torch.stack([part[name].detach().float() for name in names]) for part in parts]).sum(0)
        return {**dict(zip(names, sums.tolist(), strict=True)), "grad_norm": float(grad_norm), "lr": float(lr)}
