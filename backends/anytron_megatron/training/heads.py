"""Replacements of a model's output layer, which score tokens or sequences.

The passes of a training step never make whole logits. Only generation and comparisons with other computations do.
"""

from __future__ import annotations

import collections
import contextlib
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
)
from torch import nn

from anytron.base.errors import EngineError
from anytron.kernels.log_prob import Cap
from anytron.sequences.batch import TokenOutputs
from anytron_megatron.training.schedule import forward

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from megatron.core.tensor_parallel import ColumnParallelLinear
    from torch import Tensor

    from anytron.base.traits import ParallelSizes
    from anytron.kernels.contract import LogProbKernel
    from anytron.sequences.batch import RaggedBatch
    from anytron.sequences.scopes import ScopeFactory
    from anytron_megatron.training.micro_batch import BatchPreparer, PreparedBatch
    from anytron_megatron.training.schedule import ModelChunk


class TokenScoreHead:
    """Replace the forward of a model's output layer: it scores the labels and never holds whole logits.

    Passes in :meth:`answering_logits` are an exception: they return whole logits, for generation.

    Megatron's GPT ends with ``logits, _ = output_layer(hidden, weight=...)`` and transposes the result to
    batch-first, whatever it contains. So the output layer returns ``[S, B, 2 + D]``: the label's log-prob, the entropy,
    and one log-prob for each of the D depths of multi-token prediction.

    Args:
        layer: The model's output layer, which keeps its parameters and its place in the model.
        kernel: Kernel that computes log-probs and entropies from hidden states, capped as ``cap`` says.
        cap: How the model limits its logits; None = they have no limit.
    """

    def __init__(self, layer: ColumnParallelLinear, kernel: LogProbKernel, cap: Cap | None = None) -> None:
        self._layer = layer
        self._kernel = kernel
        self._cap = cap
        self._prepared: PreparedBatch | None = None
        self._predicted: list[Tensor] = []
        self._whole = False
        self._last: collections.deque[tuple[Tensor, Tensor]] = collections.deque(maxlen=0)
        layer.forward = self.score

    def scope(self, prepared: PreparedBatch) -> ScopeFactory:
        """Make the scope in which the output layer scores the labels of a micro-batch."""
        return partial(self._answering, prepared)

    def token_outputs(self, answers: Tensor, prepared: PreparedBatch) -> TokenOutputs:
        """Assign each log-prob and entropy to the token that was predicted; whole logits stay where they are.

        ``answers`` is float32 ``[T, 2 + D]``, or whole logits ``[T, V]``; its entry t was computed at token t, which
        predicts later tokens.
        """
        del prepared
        if self._whole:
            return TokenOutputs(logits=answers)
        log_probs, entropy, *predicted = answers.unbind(-1)
        # A sequence's last positions score nothing and hold 0 (their labels are ignored), so that a plain
        # roll gives every sequence's first tokens a 0 and every other one the score made before it.
        return TokenOutputs(
            log_probs=torch.roll(log_probs, 1),
            entropy=torch.roll(entropy, 1),
            predicted=tuple(torch.roll(values, 1 + depth) for depth, values in enumerate(predicted, start=1)),
        )

    def following(self, ahead: int) -> Tensor:
        """Return the tokens ``ahead`` places after each position of this pass: int64 ``[B, S]``, negative = none."""
        return self._micro_batch().following(ahead)

    @contextlib.contextmanager
    def answering_logits(self, remembered: int = 0) -> Iterator[None]:
        """Let forward passes in the ``with`` block return whole logits, ``[S, B, padded V]``, instead of scores.

        These passes need no micro-batch, because generation has no labels. The hidden states of the last
        ``remembered`` passes are kept for :meth:`drawn`.
        """
        self._whole, self._last = True, collections.deque(maxlen=remembered)
        try:
            yield
        finally:
            self._whole = False
            self._last.clear()

    def drawn(self, tokens: Tensor, temperature: float) -> Tensor:
        """Return the log-prob of the token that was drawn for each row, by the kernel that training uses.

        A collective of the tensor-parallel ranks.

        Args:
            tokens: int64 ``[B]``, for the last position of each row of the remembered passes.
            temperature: The sampling temperature.

        Returns:
            float32 ``[B]``.
        """
        hidden = torch.cat([rows for rows, _ in self._last])[: len(tokens)]
        weight = self._last[-1][1]
        group = parallel_state.get_tensor_model_parallel_group()
        return self._kernel(hidden, weight, tokens, temperature, group)[0]

    def score(self, hidden: Tensor, weight: Tensor | None = None, **unused: Any) -> tuple[Tensor, None]:
        """Return scores, float32 ``[S, B, 2 + D]``, or whole logits; and None for the bias.

        ``hidden`` is ``[S, B, H]``, or ``[S / tp, B, H]`` with sequence parallelism. ``weight`` is the tied embedding's
        weight, ``[V / tp, H]``; None = the layer's own weight.
        """
        del unused
        weight = self._layer.weight if weight is None else weight
        if self._whole:
            whole = self._on_every_rank(hidden)
            self._last.append((whole[-1], weight))
            shard = nn.functional.linear(whole, weight)
            if self._cap is not None:
                shard = self._cap.of(shard)
            return gather_from_tensor_model_parallel_region(shard), None
        prepared = self._micro_batch()
        log_probs, entropy = self._evaluate(hidden, prepared.inputs.labels, weight, prepared.scored)
        return torch.stack([log_probs, entropy, *self._predicted], dim=-1), None

    def predict(self, hidden: Tensor, labels: Tensor, weight: Tensor) -> None:
        """Score the labels of one depth of multi-token prediction, before the pass reaches the output layer.

        ``hidden`` and ``weight`` are as in :meth:`score`; ``labels`` are int64 ``[B, S]``, negative = ignored.
        """
        self._predicted.append(self._evaluate(hidden, labels, weight)[0])

    @contextlib.contextmanager
    def _answering(self, prepared: PreparedBatch) -> Iterator[None]:
        self._prepared, self._predicted = prepared, []
        try:
            yield
        finally:
            self._prepared, self._predicted = None, []

    def _micro_batch(self) -> PreparedBatch:
        if self._prepared is None:
            raise EngineError(
                "The model was run outside the scope of a micro-batch.",
                where="TokenScoreHead",
                why="the head knows labels and temperature only while the engine runs a micro-batch",
                fix="run the model through anytron_megatron.training.schedule.forward or forward_backward",
            )
        return self._prepared

    def _evaluate(
        self, hidden: Tensor, labels: Tensor, weight: Tensor, positions: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Log-probs of labels and entropies, float32 ``[S, B]``; 0 where labels are ignored.

        ``positions`` are those whose labels are not, int64 ``[K]`` in ``[S * B]``: a prompt costs no product with the
        vocabulary. None = look at all labels.
        """
        hidden = self._on_every_rank(hidden)
        labels = labels.t()
        if hidden.shape[:2] != labels.shape:
            raise EngineError(
                "Hidden states and labels differ in shape.",
                where="TokenScoreHead",
                why=f"hidden states have the shape {tuple(hidden.shape[:2])} (sequence, batch), but labels have "
                f"{tuple(labels.shape)}",
                fix="run the model on the tokens of the micro-batch whose scope is entered",
            )
        rows, wanted = hidden.flatten(0, 1), labels.reshape(-1)
        if positions is not None:
            rows, wanted = rows.index_select(0, positions), wanted.index_select(0, positions)
        group = parallel_state.get_tensor_model_parallel_group()
        answers = self._kernel(rows, weight, wanted, self._micro_batch().batch.temperature, group)
        if any(one.dtype != torch.float32 for one in answers):
            raise EngineError(
                "The log_prob kernel must return float32, but it returned "
                f"{' and '.join(str(one.dtype) for one in answers)}.",
                where="log_prob_kernel",
                why=(
                    "log-probs and entropies must be float32 whatever the operands' type, because policy ratios are "
                    "computed from them"
                ),
                fix="compute the softmax in float32 and return its results in float32",
            )
        scores = torch.stack(answers)
        if positions is not None:
            scores = scores.new_zeros(2, labels.numel()).index_copy(1, positions, scores)
        log_probs, entropy = scores.view(2, *labels.shape)
        return log_probs, entropy

    def _on_every_rank(self, hidden: Tensor) -> Tensor:
        """The hidden states of all positions, ``[S, B, H]``; their gradient is summed over tensor-parallel ranks."""
        if self._layer.sequence_parallel:
            whole: Tensor = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
        else:
            whole = copy_to_tensor_model_parallel_region(hidden)
        return whole


def take_cap(model: Any) -> Cap | None:
    """Return how a language model limits its logits, or None, and let it return what its output layer returns.

    mcore-bridge's Gemma 4 and Muse Glimmer limit whatever their output layer returns, which are scores with a
    :class:`TokenScoreHead`: the head must limit the logits (``mcore_bridge/model/mm_gpts``, ``gemma4.py`` and
    ``muse_glimmer.py``, ``_forward_output_layer``).
    """
    hf_config = getattr(model.config, "hf_config", None)  # mcore-bridge's; other sources' models have none
    text = None if hf_config is None else hf_config.get_text_config()
    limit = getattr(text, "final_logit_softcapping", None)
    if limit is None:
        return None
    model._forward_output_layer = partial(_plainly, model)
    return Cap(limit, getattr(text, "output_multiplier", 1.0))


def _plainly(model: Any, hidden: Tensor, **settings: Any) -> Any:
    """Return what the output layer returns, as mcore-bridge's ``GPTModel._forward_output_layer`` does."""
    return model.output_layer(hidden, **settings)[0]


class RewardHead:
    """Evaluates a reward model's output layer, ``score`` in Hugging Face's files, in float32.

    In bfloat16 a score of 20 would be rounded to a multiple of 1/8, and the scores of a group are close to each other.

    Args:
        layer: The output layer, the same on all tensor-parallel ranks; it keeps its weight ``[1, H]`` and its place.
        padding: The padding token in the model's config; None = the config has no padding token.
    """

    def __init__(self, layer: Any, padding: int | None) -> None:
        self._layer, self._padding = layer, padding
        layer.forward = self.forward

    def forward(self, hidden: Tensor, weight: Tensor | None = None, **unused: Any) -> tuple[Tensor, None]:
        """Return the score of each position, float32 ``[S, B, 1]``, and None for the bias.

        ``hidden`` is the output of the final norm: ``[S, B, H]``, or ``[S / tp, B, H]`` with sequence parallelism,
        where mcore-bridge's model gathers the scores (``mcore_bridge/model/gpt_model.py``, ``_postprocess``).
        """
        del weight, unused
        return nn.functional.linear(hidden.float(), self._layer.weight.float()), None

    def scope(self, prepared: PreparedBatch) -> None:
        """Return None: scores depend only on hidden states, so the head needs nothing else of the micro-batch."""

    def token_outputs(self, answers: Tensor, prepared: PreparedBatch) -> TokenOutputs:
        """Return the score of each sequence, taken from the scores of all tokens, float32 ``[T, 1]``."""
        places = scored_places(prepared.batch, self._padding).to(answers.device, non_blocking=True)
        return TokenOutputs(scores=answers.squeeze(-1).index_select(0, places))


def scored_places(batch: RaggedBatch, padding: int | None) -> Tensor:
    """Find the token of each sequence at which its score is read, as transformers does: int64 ``[B]``, flat indices.

    It is the last token that is not the padding token (some models use the end token for padding); if all tokens are
    padding tokens, it is the first (``transformers/modeling_layers.py``, ``GenericForSequenceClassification``).
    """
    ends = torch.cumsum(batch.lengths, 0)
    if padding is None:
        return ends - 1
    index = torch.arange(batch.num_tokens)
    starts = ends - batch.lengths
    sequence = torch.repeat_interleave(torch.arange(batch.num_sequences), batch.lengths)
    candidates = torch.where(batch.tokens != padding, index, starts[sequence])
    return starts.scatter_reduce(0, sequence, candidates, "amax")


def whole_logits(
    chunks: Sequence[ModelChunk],
    micro_batch: RaggedBatch,
    preparer: BatchPreparer,
    *,
    vocab_size: int,
    sizes: ParallelSizes,
) -> Tensor | None:
    """Compute a micro-batch's whole logits; each rank gathers all of them. A collective.

    The micro-batch is the same on every rank of a data-parallel replica; ``vocab_size`` is without padding.

    Returns:
        float32 ``[T, V]``, on the host, where row t predicts the token after token t; None except on the last pipeline
        stage.
    """
    # Interleaved schedules take multiples of the pipeline's size only.
    repeats = sizes.pipeline if sizes.virtual_pipeline > 1 else 1
    with contextlib.ExitStack() as stack:
        for chunk in chunks:
            if isinstance(chunk.head, TokenScoreHead):
                stack.enter_context(chunk.head.answering_logits())
        outputs = forward(chunks, [micro_batch] * repeats, preparer)
    if not outputs or outputs[0].logits is None:
        return None
    return outputs[0].logits[:, :vocab_size].float()
