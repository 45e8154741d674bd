"""The critic of PPO: a model with a value head, trained beside the policy. Does not build models."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from safetensors.torch import load_file, save_file
from torch import nn

from anytron.base.errors import EngineError
from anytron.sequences.batch import TokenOutputs
from anytron.workers.engines.training_engine import VALUE_HEAD, VALUE_HEAD_FILE
from anytron_megatron.training import parallel
from anytron_megatron.training.inspection import named_gradients
from anytron_megatron.training.schedule import ModelChunk, forward
from anytron_megatron.training.trained_model import DataParallel, TrainedModel

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from megatron.core.models.gpt import GPTModel
    from torch import Tensor

    from anytron.algorithms.contract import LossFunction
    from anytron.config.schema import RunConfig
    from anytron.sequences.batch import RaggedBatch
    from anytron.workers.engines.training_engine import Inspection
    from anytron_megatron.experts.experts import Experts
    from anytron_megatron.models.source import ModelSource
    from anytron_megatron.training.micro_batch import BatchPreparer, PreparedBatch


class ValueHead(nn.Module):
    """Replace the forward of a model's output layer by a linear layer of one output and no bias.

    Its weight is float32 whatever the model's dtype, and the same on all tensor-parallel ranks. It is initialised
    to zero: then the first advantages are the plain outcomes without the noise of a random layer, and the initial
    weights do not depend on the parallel layout. The trunk learns from the second update on.

    The model's own output layer stays in place. If it is not tied to the embedding, its weight is frozen: it has no
    gradient buffer and no optimizer state, and the model can be written as it was read.

    Args:
        model: A chunk of the last pipeline stage, with its weights, not wrapped for training. Becomes the
            owner of the head, as ``model.value_head``.
    """

    def __init__(self, model: GPTModel) -> None:
        super().__init__()
        layer, config = model.output_layer, model.config
        self._sequence_parallel = layer.sequence_parallel
        device = next(model.parameters()).device
        self.weight = nn.Parameter(torch.zeros(1, config.hidden_size, dtype=torch.float32, device=device))
        # With sequence parallelism each rank evaluates the positions it has, and its gradient is of these only:
        # Megatron adds the gradients of parameters with this mark over tensor-parallel ranks
        # (megatron/core/distributed/finalize_model_grads.py).
        self.weight.sequence_parallel = self._sequence_parallel  # type: ignore[attr-defined]
        if not model.share_embeddings_and_output_weights:
            layer.requires_grad_(False)
        layer.forward = self.forward
        model.value_head = self

    def forward(self, hidden: Tensor, weight: Tensor | None = None, **unused: Any) -> tuple[Tensor, None]:
        """Return the values, float32 ``[S, B, 1]``, and None for the bias, which output layers do not have.

        ``hidden`` is the output of the final norm: ``[S, B, H]``, or ``[S / tp, B, H]`` with sequence parallelism.
        """
        del weight, unused
        values = nn.functional.linear(hidden.float(), self.weight)
        if self._sequence_parallel:
            # Every rank computes the same loss of all values: none has a part of their gradient to add.
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None

    def scope(self, prepared: PreparedBatch) -> None:
        """Return None: values depend only on hidden states, so the head needs nothing else of the micro-batch."""

    def token_outputs(self, answers: Tensor, prepared: PreparedBatch) -> TokenOutputs:
        """Shift values by one token, because ``TokenOutputs.values`` has the value of the state before each token.

        ``answers`` is float32 ``[T, 1]``; its entry t is the value of the state after token t.
        """
        lengths = prepared.batch.lengths
        starts = (torch.cumsum(lengths, 0) - lengths).to(answers.device, non_blocking=True)
        return TokenOutputs(values=torch.roll(answers.squeeze(-1), 1).index_fill(0, starts, 0.0))


class Critic:
    """Add a value head to a model and train it.

    Args:
        modules: The model's chunks on this rank, with their weights, as they were built; the critic owns them.
        preparer: Preparer of the model inputs of a micro-batch.
        config: The run, with its ``critic``.
        source: The model directory that the chunks were built from.
        experts: Router replay and auxiliary losses of a mixture of experts; None for a dense model.

    Raises:
        EngineError: The value head in ``critic.path`` belongs to another model.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        preparer: BatchPreparer,
        config: RunConfig,
        source: ModelSource,
        experts: Experts | None = None,
    ) -> None:
        assert config.critic is not None
        self._modules = list(modules)
        self._source = source
        self._experts = experts
        self._head = next((ValueHead(module) for module in modules if module.post_process), None)
        if self._head is not None and config.critic.path is not None:
            _load(self._head, Path(config.critic.path) / VALUE_HEAD_FILE)
        self._preparer = preparer
        self._trained = TrainedModel(
            [ModelChunk(module, self._head if module.post_process else None) for module in modules],
            preparer,
            config.critic.optimizer,
            dtype=getattr(torch, config.model.dtype),
            data_parallel=DataParallel.of(config),
            steps=config.trainer.total_steps,
            updates_per_step=config.algorithm.epochs * config.algorithm.mini_batches,
        )

    def values(self, micro_batches: Sequence[RaggedBatch]) -> list[Tensor] | None:
        """Compute values of states without gradients (``CriticEngine.values``); None on ranks that do not report."""
        outputs = forward(self._trained.chunks, micro_batches, self._preparer)
        values = [one.values for one in outputs if one.values is not None]
        return values if parallel.topology().reports else None

    def update(self, micro_batches: Sequence[RaggedBatch], loss: LossFunction) -> Mapping[str, float] | None:
        """Do one optimizer update, and return its metrics; None on ranks that do not report.

        Implements :meth:`anytron.workers.engines.training_engine.CriticEngine.update_critic`.
        """
        features = [] if self._experts is None else [self._experts.replay_routing()]
        metrics = self._trained.update(micro_batches, loss, *features)
        balance = {} if self._experts is None else self._experts.metrics()
        return None if metrics is None else {**{f"critic/{name}": part for name, part in balance.items()}, **metrics}

    def inspect(self, micro_batches: Sequence[RaggedBatch], loss: LossFunction) -> Inspection:
        """Find non-finite numbers of an update (``InspectableEngine.inspect_update``)."""
        features = [] if self._experts is None else [self._experts.replay_routing()]
        return self._trained.inspect(micro_batches, loss, *features)

    def gradients(
        self, micro_batches: Sequence[RaggedBatch], loss: LossFunction, *, balanced: bool
    ) -> Iterator[tuple[str, Tensor]]:
        """Compute a loss's gradients and yield them by name (``DifferentiableEngine.export_gradients``).

        Args:
            micro_batches: Micro-batches of this rank.
            loss: The loss.
            balanced: Whether to add the losses that balance a mixture of experts.
        """
        experts = self._experts
        features = [] if experts is None else [experts.replay_routing() if balanced else experts.unbalanced()]
        self._trained.compute_gradients(micro_batches, loss, *features)
        head = torch.zeros(1, self._trained.chunks[0].module.config.hidden_size, device=self._preparer.device)
        if self._head is not None:
            head.copy_(self._head.weight.main_grad)  # type: ignore[attr-defined]  # set by Megatron's wrapper
        parallel.tell_replica(head)
        yield VALUE_HEAD, head
        yield from named_gradients(self._modules, partial(self._source.export, self._modules))

    def save(self, directory: Path) -> None:
        """Write the trunk as a Hugging Face model directory, with the value head (``CriticEngine.save_critic``)."""
        self._source.save(self._modules, directory)
        topology = parallel.topology()
        if self._head is not None and topology.reports and topology.dp_rank == 0:
            save_file({VALUE_HEAD: self._head.weight.detach().cpu()}, directory / VALUE_HEAD_FILE)

    @property
    def trained(self) -> TrainedModel:
        """The model with its optimizer."""
        return self._trained


def _load(head: ValueHead, file: Path) -> None:
    """Read the head that a run has saved; without a file the head keeps its initial zeros."""
    if not file.is_file():
        return
    found = load_file(file).get(VALUE_HEAD)
    if found is None or found.shape != head.weight.shape:
        expected = tuple(head.weight.shape)
        why = (
            f"it has no {VALUE_HEAD}"
            if found is None
            else f"its {VALUE_HEAD} has the shape {tuple(found.shape)}, but the critic's head has the shape {expected}"
        )
        raise EngineError(
            "The value head does not match the critic.",
            where=str(file),
            why=why,
            fix="set critic.path to a directory in which a run has saved its critic, or remove this file to start with "
            "a new head",
        )
    with torch.no_grad():
        head.weight.copy_(found)
