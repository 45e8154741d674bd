"""Compare multi-token prediction modules with their definition: the loss that they add, and its gradients.

The definition is section 2.2 of DeepSeek-V3's paper (https://arxiv.org/abs/2412.19437), computed with the layers of
transformers, which has no such modules: the layer of each module is loaded as one more layer of the model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from anytron.algorithms.policy_loss import PolicyLoss
from anytron.base.errors import ResourceError
from anytron.base.results import Result, of_error
from anytron.config.algorithm import AlgorithmSection
from anytron.config.options import chosen_engines
from anytron.proof.verification.comparisons import FACTORS
from anytron.proof.verification.engines import gradient_temperature, plan_of
from anytron.proof.verification.gradients import (
    compare_gradients,
    computed_gradients,
    frozen_reasons,
    frozen_weights,
    own_batch,
)
from anytron.proof.verification.hugging_face import LOSS, computed_by_transformers, load_model, published
from anytron.proof.verification.weights import stored_weights
from anytron.run.trainer.models import model_directory
from anytron.task.data.pretrained import read_hf_config

if TYPE_CHECKING:
    from torch import Tensor

    from anytron.config.schema import RunConfig
    from anytron.run.trainer.workers import TrainingWorkers
    from anytron.sequences.batch import RaggedBatch

_OWN = ("enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight")
"""Weights of a module besides its layer, by the names in published files."""
NOTHING = PolicyLoss(AlgorithmSection(kl_coefficient=0.0, entropy_coefficient=0.0))
"""With advantages of 0 this loss is 0, so that only the losses that the engine adds are left."""


def trains_modules(config: RunConfig) -> bool:
    """Whether the run trains multi-token prediction modules."""
    return _coefficient(config) > 0.0


def check_prediction(check: str, config: RunConfig, trainer: TrainingWorkers, batch: RaggedBatch) -> Result:
    """Compare the MTP modules' gradients, and their loss as an update reports it, with the definition.

    Args:
        check: Name of the check.
        config: Configuration of the run, which trains MTP modules.
        trainer: Training ranks, whose engine declares ``gradients``; the check changes their weights.
        batch: Sampled responses with advantages; only the first sequences are used.

    Raises:
        EngineError: transformers cannot run the model.
    """
    dtype, coefficient = config.model.dtype, _coefficient(config)
    plan, directory = plan_of(trainer, config), Path(config.trainer.output_dir)
    batch = own_batch(config, trainer, plan, replace(batch, temperature=gradient_temperature(config)))
    try:
        modules = expected_modules(
            model_directory(config),
            getattr(torch, dtype),
            batch,
            detached=bool(engine_options(config).get("mtp_detach")),
        )
    except ResourceError as error:
        return of_error(check, error, "skipped")
    assert batch.advantages is not None
    indifferent = replace(batch, advantages=torch.zeros_like(batch.advantages))
    found, manifest = computed_gradients(trainer, plan, indifferent, directory, NOTHING, additions="prediction")
    expected = {name: coefficient * gradient for name, gradient in modules.gradients.items()}
    frozen = frozen_weights(found, expected, config)
    # What the modules' loss must not reach has a gradient of 0.
    untouched = {name: torch.zeros_like(gradient) for name, gradient in found.items() if name not in expected}
    result = compare_gradients(
        check,
        found,
        {**untouched, **{name: gradient for name, gradient in expected.items() if name not in frozen}},
        dtype=dtype,
        skipped=frozen_reasons(frozen),
        what=f"parameters, {len(manifest.optional)} of them the modules',",
        whose="the definition's",
    )
    loss = trainer.update(batch, plan, LOSS)["mtp/loss"]
    detail = f"the modules' loss is {loss:.6g}, by its definition {modules.loss:.6g}; {result.detail}"
    if not abs(loss - modules.loss) <= allowed_difference(dtype, modules.loss):
        return Result(check, "failed", detail)
    return replace(result, detail=detail)


def allowed_difference(dtype: str, loss: float) -> float:
    """Return how far the modules' loss, computed in ``dtype``, may be from the expected loss."""
    return 10 * FACTORS[dtype] * max(1.0, loss)


@dataclass(frozen=True)
class ExpectedModules:
    """Loss and gradients of the modules alone by their definition, float32 on the host.

    Attributes:
        loss: The mean over the modules (prediction depths) of their cross entropies.
        gradients: float32, by the weights' names in files: of the modules' weights and, unless ``detached``, of the
            other weights.
    """

    loss: float
    gradients: dict[str, Tensor]


def expected_modules(
    directory: Path, dtype: torch.dtype, batch: RaggedBatch, *, detached: bool = True
) -> ExpectedModules:
    """Compute loss and gradients of the MTP modules of a DeepSeek-V3 model, sequence by sequence.

    Args:
        directory: Directory of the model.
        dtype: Element type to which the weights are rounded.
        batch: Sequences of T tokens in all, with ``loss_weights``.
        detached: Whether the modules treat weights that they share with the model, and its hidden states, as constants.

    Raises:
        ResourceError: The host has not enough memory.
        EngineError: transformers cannot run the model.
        ConfigError: The model's config is malformed, or transformers does not know the model.
    """
    with computed_by_transformers(directory):
        return _computed(directory, dtype, batch, detached=detached)


def _computed(directory: Path, dtype: torch.dtype, batch: RaggedBatch, *, detached: bool) -> ExpectedModules:
    depths = int(read_hf_config(directory).num_nextn_predict_layers)
    model = load_model(directory, None, dtype, layers_more=depths)
    model.model.config.num_hidden_layers -= depths  # the forward pass of the model stops there
    if detached:
        model.requires_grad_(False)
    stored = stored_weights(directory)
    computing = [_Module(model, stored, depth, dtype) for depth in range(1, depths + 1)]
    rows: list[Tensor] = []
    for tokens in batch.tokens.split(batch.lengths.tolist()):
        hidden = model.model(tokens[None], use_cache=False).last_hidden_state
        parts = []
        for module in computing:
            hidden, log_probs = module(hidden, tokens, batch.temperature)
            parts.append(log_probs)
        rows.append(torch.stack(parts).mean(0))
    assert batch.loss_weights is not None
    loss = -torch.sum(batch.loss_weights * torch.cat(rows))
    loss.backward()
    parameters = dict(model.named_parameters())
    for module in computing:
        parameters |= module.own
    trained = {name: one for name, one in parameters.items() if one.requires_grad}
    named = {name: torch.zeros_like(one) if one.grad is None else one.grad for name, one in trained.items()}
    return ExpectedModules(float(loss.detach()), published(model, named))


class _Module:
    """The module of one depth.

    Args:
        model: transformers' model, which has the module's layer behind its own.
        stored: The weights in files, with those that transformers does not load.
        depth: From 1.
        dtype: Element type to which the weights are rounded.
    """

    def __init__(self, model: Any, stored: dict[str, Tensor], depth: int, dtype: torch.dtype) -> None:
        number = model.model.config.num_hidden_layers + depth - 1
        self._model, self._depth = model, depth
        self._prefix, self._layer = f"model.layers.{number}.", model.model.layers[number].requires_grad_()
        self.own = {
            name: stored[name].to(dtype).float().requires_grad_() for name in (f"{self._prefix}{own}" for own in _OWN)
        }

    def __call__(self, hidden: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Predict token i + depth + 1 from the hidden state of the depth before at i and the token at i + depth.

        Args:
            hidden: ``[1, T - depth + 1, H]``.
            tokens: int64 ``[T]`` of one sequence.
            temperature: Divides the logits.

        Returns:
            The module's hidden states ``[1, T - depth, H]``, and log-probs float32 ``[T]`` of the tokens that it
            predicts, 0 for the others.
        """
        trunk, length = self._model.model, max(0, len(tokens) - self._depth)
        if length == 0:
            return hidden[:, :0], torch.zeros(len(tokens))
        embedded = trunk.embed_tokens.weight[tokens[self._depth :]][None]
        joined = torch.cat([self._norm(embedded, "enorm"), self._norm(hidden[:, :length], "hnorm")], -1)
        joined = joined @ self.own[f"{self._prefix}eh_proj.weight"].t()
        positions = torch.arange(length)[None]
        after = self._layer(
            joined,
            attention_mask=torch.full((length, length), -torch.inf).triu(1)[None, None],
            position_ids=positions,
            position_embeddings=trunk.rotary_emb(joined, positions),
        )
        after = self._norm(after, "shared_head.norm")
        logits = after[0, :-1] @ self._model.lm_head.weight.t() / temperature
        wanted = tokens[self._depth + 1 :]
        log_probs = logits.log_softmax(-1).gather(1, wanted[:, None])[:, 0]
        return after, torch.cat([torch.zeros(self._depth + 1), log_probs])

    def _norm(self, x: Tensor, name: str) -> Tensor:
        """RMS norm with a weight of the module's own."""
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self._model.config.rms_norm_eps)
        return self.own[f"{self._prefix}{name}.weight"] * x * scale


def engine_options(config: RunConfig) -> dict[str, Any]:
    """Return the training engine's options, with its defaults."""
    model = chosen_engines(config.engine.name, config.rollout.engine)["engine.options"].options_model
    return {} if model is None else model.model_validate(config.engine.options).model_dump()


def _coefficient(config: RunConfig) -> float:
    """The weight of the modules' loss; 0 if none are trained, or the engine knows none."""
    return float(engine_options(config).get("mtp_loss_coefficient", 0.0))
