"""Turn a ragged micro-batch into the arguments of the model's forward, through the hooks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from anytron.sequences import scopes, shared_prompts
from anytron.sequences.layout import LayoutConstraints, ModelInputs
from anytron.sequences.masks import AttnMask, MaskKind, MaskRequest, scope_of
from anytron.sequences.planning import plan_layout
from anytron.sequences.shared_prompts import Pieces, SharedPrompts, common_prompts
from anytron_megatron.training.vision import refuse_images

if TYPE_CHECKING:
    from torch import Tensor

    from anytron.base.traits import ModelTraits, ParallelSizes
    from anytron.device.hooks.facade import Hooks
    from anytron.sequences.batch import RaggedBatch
    from anytron.sequences.layout import ContextShard, Format, InputLayout, SequenceLayout
    from anytron.sequences.scopes import ScopeFactory
    from anytron_megatron.training.vision import VisionInputs


@dataclass(frozen=True)
class PreparedBatch:
    """One micro-batch, ready for a model.

    Attributes:
        inputs: Inputs of the model.
        mask: The platform's mask, of the kind and kernel mode that it chose when the engine was built. In a micro-batch
            that only fills up the number of micro-batches (``RaggedBatch.is_filler``), all tokens are padding for the
            routers of experts.
        attention_mask: Mask argument of the model's forward. None with portable modules: they find the mask
            in the scope.
        packed: Megatron's description of packed sequences; None in bshd.
        batch: The original micro-batch (host tensors).
        tokens: int64 ``[T']``, on the device: the tokens that the layout arranges. They are the batch's tokens, or with
            ``prompts`` the tokens of the pieces.
        scored: int64 ``[K]``, on the device: the K positions whose labels count, as indices into the output layer's
            rows (labels ``[R, C]``, transposed and flattened).
        prompts: The pieces into which sequences are split so that a prompt is computed once for several samples, and
            how whole sequences are made of them; None = the layout arranges whole sequences.
        loss_scale: Number of micro-batches of an update, times the number of data-parallel replicas. Megatron divides
            gradients by it; so our losses, which are normalised over the whole mini-batch already
            (``RaggedBatch.loss_weights``), are multiplied by it first.
    """

    inputs: ModelInputs
    mask: AttnMask
    attention_mask: Tensor | None
    packed: PackedSeqParams | None
    batch: RaggedBatch
    tokens: Tensor
    scored: Tensor
    loss_scale: int
    prompts: SharedPrompts | None = None

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of the model's forward."""
        return {
            "input_ids": self.inputs.input_ids,
            "position_ids": self.inputs.position_ids,
            "attention_mask": self.attention_mask,
            "packed_seq_params": self.packed,
            **self.inputs.extra,
        }

    def scope(self) -> ScopeFactory | None:
        """Make the context of the forward pass: the platform's scope, the current mask, the keys of shared prompts."""
        prompts = None if self.prompts is None else shared_prompts.scope_of(self.prompts)
        return scopes.combine(self.inputs.scope, scope_of(self.mask), prompts)

    def following(self, ahead: int) -> Tensor:
        """Return the tokens ``ahead`` places after each position: int64 ``[R, C]``, negative = none."""
        return self.inputs.layout.next_tokens(self.tokens, ahead)


class BatchPreparer:
    """Plan, pack and mask micro-batches for one model.

    Args:
        accepted: Kinds of mask that can reach the model's attention.
        shard: This rank's context-parallel shard.
        device: Device of the tensors.
        context_length: Longest sequence that the model can take, in tokens.
        portable: Whether the model is built of portable modules, which find the mask in the scope; a vendor's modules
            take it as an argument.
        vision: How the model takes images; None if it takes none.
        fp8: Whether the model computes in FP8, whose kernels take whole blocks of tokens.
        constraints: Constraints on the layout, the platform's included; None = no constraints.
        share_prompts: Whether to compute a prompt once for all of its samples in a micro-batch. Only for packed
            sequences on one context-parallel shard, in portable modules whose layers use earlier tokens through
            attention only.

    Attributes:
        mask_kind: The kind of mask and the kernel mode that the platform chose when the engine was built.
    """

    def __init__(
        self,
        hooks: Hooks,
        *,
        sequence_format: Format,
        traits: ModelTraits,
        accepted: frozenset[MaskKind],
        sizes: ParallelSizes,
        shard: ContextShard,
        device: torch.device,
        context_length: int,
        portable: bool,
        vision: VisionInputs | None = None,
        fp8: bool = False,
        constraints: LayoutConstraints | None = None,
        share_prompts: bool = False,
    ) -> None:
        self._hooks = hooks
        self._portable = portable
        self._vision = vision
        self._fp8 = fp8
        self._share_prompts = share_prompts
        self._format = sequence_format
        self._sizes = sizes
        self._shard = shard
        self.device = device
        self._context_length = context_length
        self._input_layout = _input_layout(sequence_format, traits, accepted)
        self._constraints = constraints or LayoutConstraints()
        self._request = MaskRequest(sequence_format, traits, sizes, accepted)
        self.mask_kind = hooks.build_attn_mask(self._request)

    def prepare(self, batch: RaggedBatch, micro_batches: int = 1) -> PreparedBatch:
        """Turn one of a replica's micro-batches into model inputs. Called once for each forward pass.

        ``micro_batches`` is the replica's number of micro-batches in the pass, for :attr:`PreparedBatch.loss_scale`.
        """
        # Planned on the host, where the sizes of everything are known without waiting for the device.
        pieces = common_prompts(batch.lengths, batch.tokens, batch.response_mask) if self._share_prompts else None
        lengths, host_tokens, written = batch.lengths, batch.tokens, batch.response_mask
        if pieces is not None:
            lengths, host_tokens, written = pieces.lengths, batch.tokens[pieces.tokens], written[pieces.tokens]
        planned = self._plan(lengths, self._shard)
        prompts = None if pieces is None else SharedPrompts.of(pieces, planned).to(self.device)
        labels = planned.next_tokens(host_tokens, ignored=~written)
        scored = (labels.t().flatten() >= 0).nonzero()[:, 0]
        layout = planned.to(self.device)
        tokens = host_tokens.to(self.device, non_blocking=True)
        inputs = self._hooks.preprocess_sequences(
            ModelInputs(
                layout=layout,
                input_ids=layout.taken.pack(tokens),
                position_ids=self._position_ids(batch, layout, pieces),
                labels=labels.to(self.device, non_blocking=True),
                extra=self._vision.arguments(batch, layout, self.device) if self._vision else {},
            )
        )
        mask = self.mask_of(layout)
        if mask.padding_mask is not None and batch.is_filler:
            mask = replace(mask, padding_mask=torch.ones_like(mask.padding_mask))
        attention_mask = None if self._portable else mask.for_model()
        longest = layout.max_seqlen if pieces is None else pieces.longest(layout)
        packed = self._packed(layout, longest) if self._format == "thd" else None
        loss_scale = micro_batches * self._sizes.data
        return PreparedBatch(
            inputs=inputs,
            mask=mask,
            attention_mask=attention_mask,
            packed=packed,
            batch=batch,
            tokens=tokens,
            scored=scored.to(self.device, non_blocking=True),
            loss_scale=loss_scale,
            prompts=prompts,
        )

    @property
    def traits(self) -> ModelTraits:
        """Properties of the model that determine the mask it needs."""
        return self._request.traits

    def plan(self, lengths: Tensor, shard: ContextShard) -> SequenceLayout:
        """Plan the layout of sequences of these lengths, int64 ``[B]``, on a context-parallel shard."""
        return self._plan(lengths, shard).to(self.device)

    def _plan(self, lengths: Tensor, shard: ContextShard) -> SequenceLayout:
        return plan_layout(
            lengths,
            format=self._format,
            tensor_parallel=self._sizes.tensor,
            shard=shard,
            constraints=self._constraints,
            context_length=self._context_length,
            fp8=self._fp8,
            input_layout=self._input_layout,
        )

    def mask_of(self, layout: SequenceLayout) -> AttnMask:
        """Ask the platform for the mask of a layout."""
        return self._hooks.build_attn_mask(replace(self._request, layout=layout), self.mask_kind)

    def postprocess(self, output: Tensor, prepared: PreparedBatch) -> Tensor:
        """Bring a model's output, ``[R, C, ...]``, back to the micro-batch's tokens, ``[T, ...]``."""
        answers = self._hooks.postprocess_output(output, prepared.inputs.layout)
        return answers if prepared.prompts is None else prepared.prompts.answers.take(answers)

    def _position_ids(self, batch: RaggedBatch, layout: SequenceLayout, pieces: Pieces | None) -> Tensor:
        """Return the positions of the slots that this rank computes, or of whole rows if the model itself packs them.

        mcore-bridge's vision models shard ids and images themselves and take positions sharded
        (``mcore_bridge/model/mm_gpt_model.py``, ``needs_split``).
        """
        if self._vision is not None:
            return layout.pack_axes(self._vision.position_ids(batch).to(self.device, non_blocking=True))
        refuse_images(batch)
        if pieces is not None:
            return pieces.position_ids(layout, self._context_length)
        return layout.taken.position_ids if self._input_layout == "rows" else layout.position_ids

    @staticmethod
    def _packed(layout: SequenceLayout, longest: int) -> PackedSeqParams:
        # A model that shards inside cuts at cu_seqlens_q, which must be where the padded sequences
        # lie. Its attention then sees the padding, behind all real tokens of each sequence: for them
        # nothing changes.
        real = layout.cu_seqlens if layout.whole is None else layout.cu_seqlens_padded
        return PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=real,
            cu_seqlens_kv=real,
            cu_seqlens_q_padded=layout.cu_seqlens_padded,
            cu_seqlens_kv_padded=layout.cu_seqlens_padded,
            max_seqlen_q=longest,  # also the length of Megatron's table of rotary angles
            max_seqlen_kv=longest,
        )


def _input_layout(sequence_format: Format, traits: ModelTraits, accepted: frozenset[MaskKind]) -> InputLayout:
    """Decide whether the model packs and shards. Vision models shard inside, because images go into whole sequences."""
    if sequence_format == "thd" and MaskKind.NONE not in accepted:
        return "rows"
    return "whole" if traits.vision else "shard"
