"""Models that mcore-bridge builds from a Hugging Face directory, and their weights in both directions.

mcore-bridge patches Megatron, transformers and peft when it is imported. So a patch imports it and records
these changes (:func:`anytron_megatron.patches.imports.import_bridge`), before this module is imported.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from anytron.base.errors import ConfigError, EngineError
from anytron.base.traits import AttentionHeads
from anytron.sequences.masks import MaskKind
from anytron.task.data.model_files import tensor_names
from anytron.task.data.pretrained import logits_config, read_hf_config, save_hf_config
from anytron_megatron.models.chunked_attention import longest_whole
from anytron_megatron.models.configuration import (
    SPARSE_ATTENTION_FIELDS,
    accepted_masks,
    completed,
    refuse_missing_quantisation,
    traits_of,
)
from anytron_megatron.models.families import FAMILIES
from anytron_megatron.models.loading import freeze_indexers, load_weights
from anytron_megatron.models.views import without_clones
from anytron_megatron.models.weight_names import prediction_tensors
from anytron_megatron.training.vision import VisionInputs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from megatron.core.transformer import TransformerConfig
    from torch import Tensor, nn

    from anytron.base.traits import ModelTraits, ParallelSizes
    from anytron.config.schema import ModelPart

_RECOMPUTE: Mapping[str, Mapping[str, Any]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective"},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}

SHARED_COPIES = (".embed_tokens.weight", ".shared_head.head.weight")
"""Copies of the embedding and the output layer in files: multi-token prediction modules share them with the model."""

_STACK = "base_model.model.model.language_model.layers."
_THINKER_STACK = "base_model.model.thinker.model.layers."
_OLD_STACK = re.compile(r"^base_model\.model\.(model|language_model\.model|thinker\.model)\.layers\.")
"""Prefixes of the names of a vision-language model's adapters: in transformers 5, which PEFT expects, and in files of
the older forms (Qwen2.5-VL, InternVL) and of Omni models, which mcore-bridge exports. mcore-bridge reads all of them;
of an Omni model the files' form only, while PEFT adapts the thinker."""


def _move(chunk: nn.Module, device: torch.device) -> None:
    """Move a model to its device, and refuse a device on which its parameters lose attributes.

    Raises:
        EngineError: A parameter has lost attributes, or modules share a parameter no longer.
    """
    before = {name: frozenset(vars(parameter)) for name, parameter in chunk.named_parameters()}
    chunk.to(device)
    for name, parameter in chunk.named_parameters():
        lost = before.get(name, frozenset({"its tie to another parameter"})) - vars(parameter).keys()
        if lost:
            raise EngineError(
                "A parameter lost attributes when the model was moved to its device.",
                where=f"{name}, device {device}",
                why=f"on this device torch makes new parameters, which lack: {', '.join(sorted(lost))}; Megatron needs "
                "these attributes to sum gradients",
                fix="report this to the authors of the platform: with redirects_torch_cuda = True, Anytron carries "
                "attributes over; otherwise the package that adds the device to torch must do so in "
                "torch.nn.Module._apply",
            )


class BridgeSource:
    """One Hugging Face model directory as a Megatron model, built and converted by mcore-bridge.

    Implements :class:`anytron_megatron.models.source.AdapterSource`.

    Args:
        model_dir: Directory with ``config.json`` and safetensors.
        dtype: Element type of parameters and activations.
        sizes: The parallel sizes; process groups must exist.
        recompute: ``none``, ``selective`` or ``full``.
        deterministic: Megatron's ``deterministic_mode``.
        predicts_ahead: Whether to build the model's multi-token prediction modules.
        scores: Whether the model classifies sequences with one label: its output layer has one row.
        portable: Whether the model is built of :mod:`anytron_megatron.portable_te`; its activation is then the
            platform's SwiGLU kernel, if the model's layers can take it.
        transformer: Fields of Megatron's transformer config to override.

    Raises:
        ConfigError: ``transformer`` names a number format that the device lacks, or the bridge or Megatron refuses
            the model's configuration.
    """

    def __init__(
        self,
        model_dir: Path,
        *,
        dtype: torch.dtype,
        sizes: ParallelSizes,
        recompute: str,
        deterministic: bool,
        predicts_ahead: bool = False,
        scores: bool = False,
        portable: bool = False,
        transformer: Mapping[str, Any],
    ) -> None:
        from mcore_bridge import MLAModelConfig, hf_to_mcore_config
        from mcore_bridge.model import get_mcore_model_type, get_model_meta

        self.model_dir = model_dir
        self.hf_config = read_hf_config(model_dir)
        self._names = tensor_names(model_dir)
        family = get_mcore_model_type(self.hf_config.model_type)
        assert family is not None  # checks/model.py
        text_config = self.hf_config.get_text_config()
        modules = getattr(text_config, "num_nextn_predict_layers", None) if predicts_ahead else None
        try:
            converted = completed(hf_to_mcore_config(self.hf_config))
        except Exception as error:  # each family's reading of its fields fails in its own way
            raise _unreadable(model_dir, error) from error
        part = logits_config(self.hf_config)
        if part is not self.hf_config:  # mcore-bridge asks the thinker's text_config, transformers the thinker
            converted["untie_embeddings_and_output_weights"] = not part.tie_word_embeddings
        variant = converted.get("experimental_attention_variant")
        recurrent = variant == "gated_delta_net"
        config_class = get_model_meta(family).config_cls
        if converted.get("multi_latent_attention"):
            config_class = MLAModelConfig
        fields = {
            **converted,
            **_RECOMPUTE[recompute],
            **(SPARSE_ATTENTION_FIELDS if variant == "dsa" else {}),
            "params_dtype": dtype,
            "bf16": dtype is torch.bfloat16,
            "tensor_model_parallel_size": sizes.tensor,
            "pipeline_model_parallel_size": sizes.pipeline,
            "virtual_pipeline_model_parallel_size": sizes.virtual_pipeline if sizes.virtual_pipeline > 1 else None,
            "context_parallel_size": 1 if recurrent else sizes.context,
            "expert_model_parallel_size": sizes.expert,
            "expert_tensor_parallel_size": sizes.expert_tensor,
            "sequence_parallel": sizes.sequence_parallel,
            "deterministic_mode": deterministic,
            "mtp_num_layers": modules,
            # Without it embedding and output weights lack tensor_model_parallel, the gradient norm of
            # TP > 1 comes out too small (1.757 for 2.032) and clipping differs.
            "perform_initialization": True,
            # Megatron requires True for interleaved pipelines and False otherwise.
            "overlap_p2p_comm": sizes.virtual_pipeline > 1,
            # Megatron's own output layer refuses it without Apex's extension, Transformer Engine or not
            # (megatron/core/tensor_parallel/layers.py, ColumnParallelLinear).
            "gradient_accumulation_fusion": False,
            # A head of its own, also where the config ties the output layer of a language model to the embedding.
            **(
                {"task_type": "seq_cls", "num_labels": 1, "untie_embeddings_and_output_weights": True} if scores else {}
            ),
        }
        try:
            self.config = config_class(**{**fields, **transformer})
        except Exception as error:  # as above, and Megatron's own checks
            raise _unreadable(model_dir, error) from error
        # Megatron before 0.18 constructs no Gated DeltaNet's with it; patches/delta_net.py does the rest.
        self.config.context_parallel_size = sizes.context
        if self.hf_config.model_type == "ernie4_5_moe":
            # Megatron constructs no router of a softmax with it; the patches megatron.router-biased-softmax and
            # megatron.mcore-bridge-ernie-bias do the rest.
            self.config.moe_router_enable_expert_bias = True
        if portable and "use_te_activation_func" not in transformer:
            self.config.use_te_activation_func = _takes_swiglu_kernel(self.config, self.hf_config.model_type)
        refuse_missing_quantisation(self.config)
        self._bridge = self.config.bridge

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary without padding; Megatron pads it to a multiple of the tensor-parallel size."""
        return int(self.config.padded_vocab_size)

    @property
    def context_length(self) -> int:
        """Longest sequence that the model can take, in tokens; of Llama 4 one that is within a chunk."""
        whole = longest_whole(self.hf_config.to_dict())
        longest = int(self.config.max_position_embeddings)
        return longest if whole is None else min(longest, whole)

    @property
    def attention_heads(self) -> AttentionHeads:
        """Numbers and sizes of the heads of the model's full (not linear) attention."""
        config = self.config
        heads = config.num_attention_heads
        if config.multi_latent_attention:
            return AttentionHeads(heads, heads, config.qk_head_dim + config.qk_pos_emb_head_dim, config.v_head_dim)
        return AttentionHeads(heads, config.num_query_groups or heads, config.kv_channels, config.kv_channels)

    @property
    def traits(self) -> ModelTraits:
        """Properties of the model that determine the mask it needs."""
        traits = traits_of(self.config)
        return replace(
            traits,
            vision=bool(self.config.is_multimodal),
            linear_attention=traits.linear_attention or self.config.linear_num_value_heads is not None,
        )

    @property
    def vision(self) -> VisionInputs | None:
        """How the model takes images; None if it takes none."""
        takes_images = FAMILIES[self.hf_config.model_type].takes_images and not self.config.language_model_only
        return VisionInputs.from_config(self.hf_config) if takes_images else None

    @property
    def fp8(self) -> bool:
        """Whether linear layers compute in FP8."""
        return bool(self.config.fp8)

    @property
    def experts_config(self) -> TransformerConfig | None:
        """Megatron's transformer config if the model is a mixture of experts; None for a dense model."""
        return self.config if self.config.num_moe_experts else None

    @property
    def parts(self) -> Mapping[ModelPart, Sequence[str]]:
        """Prefixes of parameters' names for each part of a vision-language model, as mcore-bridge declares them."""
        vision = self.config.model_meta.visual_cls
        if vision is None:
            return {}
        return {
            "vision_tower": [f"visual.{prefix}." for prefix in vision._vision_tower],
            "aligner": [f"visual.{prefix}." for prefix in vision._aligner],
            "language_model": ["language_model."],
        }

    def accepted_masks(self, sequence_format: str, *, portable: bool) -> frozenset[MaskKind]:
        """Return the kinds of mask that can reach the model's attention."""
        if self.traits.sparse_attention:
            return frozenset({MaskKind.NONE})
        ranks = self.config.context_parallel_size
        return accepted_masks(sequence_format, context_parallel=ranks, vision=self.traits.vision, portable=portable)

    def build(self, device: torch.device, check: Callable[[list[nn.Module]], object] | None = None) -> list[nn.Module]:
        """Build this rank's model chunks and load their weights. A collective.

        Towers of a model that gets no images are frozen: without a gradient, weight decay would still move them.

        Args:
            device: Device of the chunks; some modules are first made on the host (MindSpeed's norms).
            check: Called with the chunks before their weights are read; may raise to refuse the model. None = no check.

        Raises:
            EngineError: A tensor is missing from the directory or has a wrong shape, or a file is damaged.
        """
        from mcore_bridge import get_mcore_model

        chunks: list[nn.Module] = get_mcore_model(self.config)
        if check is not None:
            check(chunks)
        for chunk in chunks:
            _move(chunk, device)
        load_weights(self._bridge, chunks, self.model_dir, self.config.num_layers, self._names)
        if self.traits.sparse_attention:
            freeze_indexers(chunks)
        if self.vision is None:
            for tower in (getattr(chunk, "visual", None) for chunk in chunks):
                if tower is not None:
                    tower.requires_grad_(False)
        return chunks

    def export(self, chunks: Sequence[nn.Module], *, saving: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights under their Hugging Face names, on the host, on rank 0.

        A collective: every rank must exhaust the iterator; other ranks yield nothing. Copies of the
        embedding and the output layer that multi-token prediction modules have in files are left out, and so is an
        Omni model's talker.

        Where the model is on the host, tensors are views of its parameters, as far as their layout allows: they change
        with the parameters.

        Args:
            chunks: The model on this rank.
            saving: Whether the weights are for a model directory, in which some families' tensors are arranged
                differently.
        """
        weights = self._bridge.export_weights(chunks, target_device="cpu", only_master_rank=True, _is_saving=saving)
        for name, tensor in without_clones(weights):
            if tensor is not None and not (name.endswith(SHARED_COPIES) and self.prediction_names([name])):
                yield name, tensor

    def prediction_names(self, names: Iterable[str]) -> frozenset[str]:
        """Find the exported tensors that belong to multi-token prediction modules."""
        return prediction_tensors(names, self.config.num_layers)

    def export_adapters(self, chunks: Sequence[nn.Module]) -> Iterator[tuple[str, Tensor]]:
        """Yield the adapters' weights under PEFT's names, on the host, on rank 0. A collective, as :meth:`export`."""
        weights = self._bridge.export_weights(chunks, target_device="cpu", only_master_rank=True, peft_format=True)
        for name, tensor in weights:
            if tensor is not None:
                yield _OLD_STACK.sub(_STACK, name) if self.traits.vision else name, tensor

    def close(self) -> None:
        """Delete mcore-bridge's reference to a process group that is about to end.

        mcore-bridge keeps its first group over expert- and pipeline-parallel ranks, and would use it for all later
        bridges, even with other parallel sizes (``mcore_bridge/bridge/gpt_bridge.py``, ``EP_PP_GROUP``).
        """
        from mcore_bridge.bridge import gpt_bridge

        gpt_bridge.EP_PP_GROUP = None

    def load_adapters(self, chunks: Sequence[nn.Module], directory: Path) -> None:
        """Load adapters in PEFT's format into the model's adapters.

        Raises:
            EngineError: Layers that Megatron joins into one, such as ``q_proj`` and ``k_proj``, have different ``A`` on
                disk.
        """
        try:
            self._bridge.load_weights(chunks, str(directory), peft_format=True, converter=self._of_files)
        except AssertionError as error:  # mcore_bridge/bridge/gpt_bridge.py, _set_qkv and its like
            raise EngineError(
                "Megatron cannot train this adapter.",
                where=str(directory),
                why=f"{error}: Megatron keeps q_proj, k_proj and v_proj in one layer with one lora_A, and likewise "
                "gate_proj and up_proj, but in this adapter each has its own",
                fix="merge the adapter into the model (merge_and_unload in PEFT), and train a new adapter on the "
                "merged model",
            ) from error

    def _of_files(self, name: str, tensor: Any) -> tuple[str, Any]:
        """Give an adapter's tensor the name that mcore-bridge reads."""
        whole = logits_config(self.hf_config) is self.hf_config
        return name if whole else name.replace(_STACK, _THINKER_STACK), tensor

    def save(self, chunks: Sequence[nn.Module], path: Path) -> None:
        """Write a Hugging Face model directory: sharded safetensors and config. A collective.

        Copied from the original directory are multi-token prediction modules that were not built, an Omni model's
        talker, and the tensors and the config of other models that lie there beside the language model.
        """
        from mcore_bridge.utils import StreamingSafetensorSaver

        saver = StreamingSafetensorSaver(save_dir=str(path))
        embedding: Tensor | None = None
        head: Tensor | None = None
        written = set()
        for name, tensor in self.export(chunks, saving=True):
            saver.add_tensor(self._names.outer(name), tensor)
            written.add(name)
            embedding = tensor if name == self._bridge.hf_embed_key else embedding
            head = tensor if name == self._bridge.hf_lm_head_key else head
        if torch.distributed.get_rank() == 0:
            now = dict(zip(SHARED_COPIES, (embedding, embedding if head is None else head), strict=True))
            for name, stored in self._left_out(written):
                own = self._names.inner(name)
                copied = next((tensor for copy, tensor in now.items() if own is not None and own.endswith(copy)), None)
                saver.add_tensor(name, stored if copied is None else copied.clone())
            save_hf_config(self.hf_config, self.model_dir, path)
        saver.finalize()
        torch.distributed.barrier()

    def _left_out(self, written: set[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors of parts that are not built, which the files have and the export lacks."""
        from mcore_bridge.utils import SafetensorLazyLoader

        with SafetensorLazyLoader(str(self.model_dir)) as files:
            tensors = files.get_state_dict()
            inner = {name: self._names.inner(name) for name in tensors}
            ahead = self.prediction_names(filter(None, inner.values())) - written
            for name in sorted(name for name, own in inner.items() if own is None or own in ahead):
                yield name, tensors[name].load()


def _unreadable(model_dir: Path, error: Exception) -> ConfigError:
    return ConfigError(
        "Megatron and mcore-bridge refuse the model's configuration.",
        where=str(model_dir / "config.json"),
        why=f"{type(error).__name__}: {error}",
        fix="compare config.json with the published file, remove fields of engine.options.transformer that contradict "
        "it, or train a model of another family (docs/reference/families.md)",
    )


def _takes_swiglu_kernel(config: Any, model_type: str) -> bool:
    """Whether a model's layers take an activation module, and :func:`anytron.kernels.fused.swiglu` computes theirs.

    Layers take no such module in mcore-bridge's specs for models with Gated DeltaNet. Families that no test compares
    with Hugging Face are left out, because it is not known whether theirs take one.
    """
    known = FAMILIES.get(model_type)
    compared = known is not None and bool(known.proof) and config.experimental_attention_variant is None
    gated = config.gated_linear_unit and config.activation_func is torch.nn.functional.silu
    return compared and gated and config.activation_func_clamp_value is None and not config.bias_activation_fusion
