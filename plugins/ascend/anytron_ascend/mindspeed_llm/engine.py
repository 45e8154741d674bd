"""The MindSpeed-LLM training engine: one rank of it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import save_torch_state_dict
from transformers import AutoConfig

from anytron.engines.weights import write_weights
from anytron.errors import EngineError
from anytron.kernels.contract import LogProbSpec
from anytron.layer import apply_phase
from anytron.masks import MaskKind
from anytron.patches import Phase
from anytron.trainer.initial_model import model_directory
from anytron.traits import ModelTraits
from anytron_ascend.mindspeed_llm.arguments import translate
from anytron_ascend.mindspeed_llm.models import build_model
from anytron_ascend.mindspeed_llm.options import MindSpeedLlmOptions
from anytron_ascend.mindspeed_llm.process_state import put_in_force, release
from anytron_ascend.mindspeed_llm.weights import HuggingFaceWeights
from anytron_megatron.critic.critic import Critic
from anytron_megatron.training import parallel
from anytron_megatron.training.logits import whole_logits
from anytron_megatron.training.memory import release_memory
from anytron_megatron.training.micro_batch import BatchPreparer
from anytron_megatron.training.schedule import ModelChunk, forward
from anytron_megatron.training.token_score_head import TokenScoreHead
from anytron_megatron.training.trained_model import TrainedModel

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from anytron.algorithms.contract import LossFunction
    from anytron.batch import RaggedBatch, TokenOutputs
    from anytron.engines.protocol import Conformance, EngineContext, Topology, TrainedRole
    from anytron.engines.weights import WeightManifest


class MindSpeedLlmEngine:
    """Train one policy, and the critic of PPO, as models of MindSpeed-LLM; score tokens.

    Put together of the Megatron backend's parts; the models, their arguments and their weights are its own.
    Implements :class:`anytron.engines.protocol.TrainingEngine`.

    Args:
        context: Configuration, hooks, platform, ledger and rank.
    """

    def __init__(self, context: EngineContext) -> None:
        config = context.config
        self._context = context
        self._sizes = config.parallel.sizes()
        self._runtime = context.platform.runtime()
        self._dtype = getattr(torch, config.model.dtype)
        directory = model_directory(config)
        options = MindSpeedLlmOptions.read(config.engine.options)
        model = AutoConfig.from_pretrained(directory, local_files_only=True)
        self._arguments = put_in_force(translate(config, model, options), context.ledger)
        apply_phase(Phase.BEFORE_PARALLEL_INIT, context.hooks, context.ledger)
        parallel.initialize(
            self._runtime, self._sizes, seed=config.trainer.seed, timeout_s=config.executor.call_timeout_s
        )
        apply_phase(Phase.BEFORE_BUILD, context.hooks, context.ledger)
        self._weights = self._weights_of(directory)
        self._preparer = BatchPreparer(
            context.hooks,
            sequence_format=config.engine.sequence_format,
            traits=ModelTraits(causal=True, mixture_of_experts=bool(self._arguments.num_experts)),
            # Its attention makes the compressed triangle itself, in both formats.
            accepted=frozenset({MaskKind.NONE}),
            sizes=self._sizes,
            shard=parallel.context_shard(),
            device=self._runtime.current_device(),
            context_length=self._arguments.max_position_embeddings,
            portable=False,
        )
        self._policy = self._build()
        self._reference = self._build() if config.algorithm.kl_coefficient > 0 else None
        self._trained = TrainedModel(
            self._policy,
            self._preparer,
            config.optimizer,
            dtype=self._dtype,
            distributed_optimizer=config.engine.distributed_optimizer,
            steps=config.policy_steps,
            updates_per_step=config.algorithm.epochs * config.algorithm.mini_batches,
        )
        self._critic: Critic | None = None
        if config.critic is not None:
            weights = self._weights if config.critic.path is None else self._weights_of(Path(config.critic.path))
            self._critic = Critic([self._model(weights)], self._preparer, config, partial(self._save, weights))
        apply_phase(Phase.AFTER_BUILD, context.hooks, context.ledger)

    def topology(self) -> Topology:
        """Where this rank stands."""
        return parallel.topology()

    def score(self, micro_batches: Sequence[RaggedBatch], role: TrainedRole = "policy") -> list[TokenOutputs] | None:
        """Compute log-probs and entropies of a model's tokens, without gradients."""
        chunks = self._policy if role == "policy" else self._reference
        if chunks is None:
            raise EngineError("There is no reference model.", where="score", fix="set algorithm.kl_coefficient above 0")
        outputs = forward(chunks, micro_batches, self._preparer)
        return outputs if parallel.topology().reports else None

    def logits(self, micro_batch: RaggedBatch) -> Tensor | None:
        """Compute the policy's whole logits, for comparisons; each rank gathers all of them."""
        vocab_size = self._arguments.vocab_size
        logits = whole_logits(self._policy, micro_batch, self._preparer, vocab_size=vocab_size, sizes=self._sizes)
        return logits if parallel.topology().reports else None

    def attention_conformance(self) -> Conformance | None:
        """Nothing of its own: masks and kernels are MindSpeed-LLM's, and the other checks cover them."""
        return None

    def update(self, micro_batches: Sequence[RaggedBatch], loss: LossFunction) -> Mapping[str, float] | None:
        """Do one optimizer update on this copy's share of a mini-batch."""
        return self._trained.update(micro_batches, loss)

    def values(self, micro_batches: Sequence[RaggedBatch]) -> list[Tensor] | None:
        """Ask the critic for its values, without gradients."""
        return self._the_critic("values").values(micro_batches)

    def update_critic(self, micro_batches: Sequence[RaggedBatch], loss: LossFunction) -> Mapping[str, float] | None:
        """Do one optimizer update of the critic."""
        return self._the_critic("update_critic").update(micro_batches, loss)

    def export_weights(self, path: str) -> WeightManifest | None:
        """Write the policy's weights as one safetensors file; rank 0 returns the manifest."""
        weights = _on_first_host(self._weights, self._modules())
        if torch.distributed.get_rank() != 0:
            return None
        return write_weights(weights, path, self._trained.updates)

    def save_hf(self, path: str) -> None:
        """Write a complete Hugging Face model directory (without tokenizer)."""
        self._save(self._weights, self._modules(), Path(path))

    def save_adapter(self, path: str) -> None:
        """There are none: ``model.lora`` is refused before."""
        raise EngineError("There are no adapters.", where=f"save_adapter, {path}")

    def save_critic(self, path: str) -> None:
        """Write the critic: its trunk as a Hugging Face model directory (without tokenizer), and its head."""
        self._the_critic("save_critic").save(Path(path))

    def describe(self) -> Mapping[str, Any]:
        """Facts for the run's records."""
        return {
            "rank": torch.distributed.get_rank(),
            "device": self._runtime.device_name(),
            "attention_mask": {
                "kind": self._preparer.mask_kind.kind.value,
                "mode": self._preparer.mask_kind.kernel_mode,
            },
            "kernels": self._context.hooks.suppliers(),
            "patches": self._context.ledger.report(),
        }

    def close(self) -> None:
        """Leave the process groups; another engine may be built in this process afterwards."""
        critic = [] if self._critic is None else self._critic.chunks
        release_memory(chunk.module for chunk in [*self._trained.chunks, *(self._reference or []), *critic])
        parallel.destroy()
        self._runtime.empty_cache()
        release()

    def _build(self) -> list[ModelChunk]:
        spec = LogProbSpec(
            vocab_size=self._arguments.vocab_size,
            tensor_parallel=self._sizes.tensor,
            chunk_tokens=self._context.config.engine.log_prob_chunk_tokens,
            device_type=self._runtime.device_type,
        )
        model = self._model(self._weights)
        head = None
        if model.post_process:
            head = TokenScoreHead(model.output_layer, self._context.hooks.log_prob_kernel(spec))
        return [ModelChunk(model, head)]

    def _model(self, weights: HuggingFaceWeights) -> torch.nn.Module:
        model = build_model(self._arguments, self._runtime.current_device(), self._dtype)
        weights.load([model])
        return model

    def _weights_of(self, directory: Path) -> HuggingFaceWeights:
        return HuggingFaceWeights(directory, dtype=self._dtype, padded_vocab_size=self._arguments.padded_vocab_size)

    def _modules(self) -> list[torch.nn.Module]:
        return [chunk.module for chunk in self._policy]

    def _the_critic(self, where: str) -> Critic:
        if self._critic is None:
            raise EngineError("There is no critic.", where=where, fix="set algorithm.advantage=gae and critic")
        return self._critic

    @staticmethod
    def _save(weights: HuggingFaceWeights, modules: Sequence[torch.nn.Module], path: Path) -> None:
        tensors = _on_first_host(weights, modules)
        if torch.distributed.get_rank() == 0:
            path.mkdir(parents=True, exist_ok=True)
            save_torch_state_dict(tensors, path)
            weights.hf_config.save_pretrained(path)
        torch.distributed.barrier()


def _on_first_host(weights: HuggingFaceWeights, modules: Sequence[torch.nn.Module]) -> dict[str, Tensor]:
    """A model's weights on the host of rank 0; nothing on others. A collective."""
    first = torch.distributed.get_rank() == 0
    return {name: tensor.cpu().contiguous() for name, tensor in weights.export(modules) if first}
