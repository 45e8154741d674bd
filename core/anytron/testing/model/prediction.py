"""The rule of level ``model`` about multi-token prediction."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file

from anytron.limits import Feature
from anytron.testing.model.observed import Observer, recorded_of
from anytron.testing.model.parts import SHOWN, gradients_shown, hold_gradients, weights_of
from anytron.testing.model.table import CONTEXT, DEEPSEEK_V3, ONE, PADDED, PIPELINE, TENSOR, cases
from anytron.testing.prediction_modules import turn_last_layers_into_prediction_modules
from anytron.testing.rules import Broken, rule
from anytron.testing.tiny_models import write_tiny_model
from anytron.testing.training_ranks import START_S, said
from anytron.verification.hugging_face import LOSS, expected_gradients, load_model, published, quiet
from anytron.verification.observation import OTHER_TEMPERATURE, plan_of
from anytron.verification.tolerances import FACTORS

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from anytron.batch import RaggedBatch
    from anytron.testing.rules import Case
    from anytron.testing.subject import Subject

DEPTHS = 2
SECTIONS: dict[str, dict[str, Any]] = {"optimizer": dict(SHOWN), "engine": {"options": {"mtp_loss_coefficient": 1.0}}}


@rule(
    "multi-token-prediction",
    "model",
    "Prediction modules (MTP) have the loss and the gradients of their definition, and leave the policy's as they are.",
    cases=(
        *cases(ONE, DEEPSEEK_V3),
        *cases(PADDED, DEEPSEEK_V3),
        *cases(TENSOR, DEEPSEEK_V3),
        *cases(PIPELINE, DEEPSEEK_V3),
        *cases(CONTEXT, DEEPSEEK_V3),
    ),
    needs=(Feature.MULTI_TOKEN_PREDICTION,),
    limit_s=START_S,
)
def prediction(subject: Subject, case: Case) -> None:
    """Do one update of a tiny DeepSeek-V3 of two layers, with two modules that predict one and two tokens further.

    The definition is section 2.2 of the paper (https://arxiv.org/abs/2412.19437), computed with the layers of
    transformers; the way that each weight goes is its gradient. It breaks with a vendor's own modules that join hidden
    states and embeddings otherwise, or shift tokens over the bounds of packed sequences.
    """
    family, layout = case.values
    observer = Observer.of(subject)
    model = observer.output / "model-with-modules"
    if not model.exists():
        write_tiny_model(family.name, model)
        turn_last_layers_into_prediction_modules(model, DEPTHS)
    config, trainer = observer.build(family, layout, SECTIONS, model)
    dtype = config.model.dtype
    batch = replace(recorded_of(family), temperature=OTHER_TEMPERATURE)
    policy = expected_gradients(model, None, getattr(torch, dtype), batch)
    modules = Modules.of(model, batch, getattr(torch, dtype))
    file = observer.output / "after.safetensors"
    with said():
        metrics = trainer.update(policy.batch, plan_of(trainer, config, group_size=1), LOSS)
        trainer.export_weights(str(file))
    loss, allowed = metrics.get("mtp/loss", 0.0), 10 * FACTORS[dtype] * max(1.0, modules.loss)
    if not abs(loss - modules.loss) <= allowed:
        difference = f"it is {loss:.6g}, expected {modules.loss:.6g} to {allowed:.1g}"
        raise Broken("The loss of the prediction modules is not that of their definition.", difference)
    found = gradients_shown(weights_of(model), load_file(file))
    hold_gradients("The modules' gradients are not those of their definition.", found, modules.gradients, dtype)
    hold_gradients("Beside prediction modules the policy has other gradients.", found, policy.gradients, dtype)


@dataclass(frozen=True)
class Modules:
    """What the definition gives for the modules alone, float32 on the host.

    Attributes:
        loss: The mean of the depths' cross entropies.
        gradients: float32, by the weights' names in files.
    """

    loss: float
    gradients: dict[str, Tensor]

    @classmethod
    def of(cls, directory: Path, batch: RaggedBatch, dtype: torch.dtype) -> Modules:
        """Compute it, sequence by sequence; what the modules share with the model is a constant to them.

        Args:
            directory: The model's, with :data:`DEPTHS` modules.
            batch: T tokens, with ``loss_weights``.
            dtype: What the weights are rounded to.
        """
        with quiet():
            model = load_model(directory, None, dtype, layers_more=DEPTHS)
        model.model.config.num_hidden_layers -= DEPTHS  # the forward pass of the model stops there
        computing = [_Module(model, directory, depth, dtype) for depth in range(1, DEPTHS + 1)]
        rows: list[Tensor] = []
        for tokens in batch.tokens.split(batch.lengths.tolist()):
            with torch.no_grad():
                hidden = model.model(tokens[None], use_cache=False).last_hidden_state
            parts = []
            for module in computing:
                hidden, log_probs = module(hidden, tokens, batch.temperature)
                parts.append(log_probs)
            rows.append(torch.stack(parts).mean(0))
        assert batch.loss_weights is not None, "recorded trajectories have them"
        loss = -torch.sum(batch.loss_weights * torch.cat(rows))
        loss.backward()
        named: dict[str, Tensor] = {}
        for module in computing:
            layer = {f"{module.prefix}{name}": one.grad for name, one in module.layer.named_parameters()}
            own = {name: one.grad for name, one in module.own.items()}
            named |= {name: grad for name, grad in {**layer, **own}.items() if grad is not None}
        return cls(float(loss.detach()), published(model, named))


class _Module:
    """The module of one depth.

    Args:
        model: transformers' model, which has the module's layer behind its own.
        directory: Has what transformers does not load.
        depth: From 1.
        dtype: What the weights are rounded to.
    """

    def __init__(self, model: Any, directory: Path, depth: int, dtype: torch.dtype) -> None:
        number = model.model.config.num_hidden_layers + depth - 1
        self._model, self._depth = model, depth
        self.prefix, self.layer = f"model.layers.{number}.", model.model.layers[number]
        stored = weights_of(directory)
        names = ("enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight")
        self.own = {
            f"{self.prefix}{name}": stored[f"{self.prefix}{name}"].to(dtype).float().requires_grad_() for name in names
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
        embedded = trunk.embed_tokens.weight.detach()[tokens[self._depth :]][None]
        joined = torch.cat([self._norm(embedded, "enorm"), self._norm(hidden[:, :length], "hnorm")], -1)
        joined = joined @ self.own[f"{self.prefix}eh_proj.weight"].t()
        positions = torch.arange(length)[None]
        after = self.layer(
            joined,
            attention_mask=torch.full((length, length), -torch.inf).triu(1)[None, None],
            position_ids=positions,
            position_embeddings=trunk.rotary_emb(joined, positions),
        )
        after = self._norm(after, "shared_head.norm")
        logits = after[0, :-1] @ self._model.lm_head.weight.detach().t() / temperature
        wanted = tokens[self._depth + 1 :]
        log_probs = logits.log_softmax(-1).gather(1, wanted[:, None])[:, 0]
        return after, torch.cat([torch.zeros(self._depth + 1), log_probs])

    def _norm(self, x: Tensor, name: str) -> Tensor:
        """RMS norm with a weight of the module's own."""
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self._model.config.rms_norm_eps)
        return self.own[f"{self.prefix}{name}.weight"] * x * scale
