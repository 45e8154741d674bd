"""The rule of level ``model`` about the critic."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file

from anytron.algorithms.value_loss import ValueLoss
from anytron.batch import TokenOutputs
from anytron.limits import Feature
from anytron.testing.model.observed import Observer, recorded_of
from anytron.testing.model.parts import SHOWN, gradients_shown, hold_gradients, hold_values, weights_of
from anytron.testing.model.table import CONTEXT, DEEPSEEK_V3, ONE, PADDED, PIPELINE, QWEN2, QWEN3, TENSOR, cases
from anytron.testing.rules import Broken, rule
from anytron.testing.training_ranks import START_S, said
from anytron.verification.hugging_face import load_model, published, quiet
from anytron.verification.observation import plan_of

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from anytron.batch import RaggedBatch
    from anytron.testing.rules import Case
    from anytron.testing.subject import Subject

HEAD_FILE, HEAD = "value_head.safetensors", "value_head.weight"
"""What a critic's directory has beside its trunk: one float32 tensor ``[1, H]``."""
LOSS = ValueLoss()
_BEFORE = torch.tensor([0.8, -0.2, 0.3, -0.9])
"""Values before the update, less those now, in turn: within and beyond what the loss lets a value move."""
_RETURNS = torch.tensor([1.0, -1.5, 0.6])
"""Returns, less the values now."""


@rule(
    "critic",
    "model",
    "A critic has the values, and the gradients of its value head and its trunk, that transformers gives it.",
    cases=(
        *cases(ONE, QWEN3, QWEN2, DEEPSEEK_V3),
        *cases(PADDED, QWEN3),
        *cases(TENSOR, QWEN3),
        *cases(PIPELINE, QWEN2),
        *cases(CONTEXT, QWEN3),
    ),
    needs=(Feature.CRITIC,),
    limit_s=START_S,
)
def critic(subject: Subject, case: Case) -> None:
    """Compute values of all tokens with a second model, and do one update of it.

    transformers computes hidden states and the same clipped loss; the way that each weight goes is its gradient. It
    breaks with hooks that take every output for log-probs of a response (values belong to each token, and may be
    positive), and with kernels or scopes that hold something of the policy, which is in the same process.
    """
    family, layout = case.values
    observer = Observer.of(subject)
    model = observer.model(family)
    start, left = observer.output / "critic-before", observer.output / "critic-after"
    for directory in (start, left):
        shutil.rmtree(directory, ignore_errors=True)
    head = _write_critic(model, start)
    sections: dict[str, dict[str, Any]] = {
        "critic": {"path": str(start), "optimizer": SHOWN},
        "algorithm": {"advantage": "gae"},
    }
    config, trainer = observer.build(family, layout, sections)
    dtype = config.model.dtype
    truth = Truth.of(model, head, recorded_of(family), getattr(torch, dtype))
    with said():
        plan = plan_of(trainer, config, group_size=1)
        values = trainer.with_values(truth.batch, plan).values
        if values is None:
            raise Broken("The ranks answer without values.")
        hold_values("Values are not those of transformers' hidden states.", values, truth.values, dtype)
        trainer.update_critic(truth.batch, plan, LOSS)
        trainer.save_critic(str(left))
    before, after = {**weights_of(model), HEAD: head}, {**weights_of(left), **load_file(left / HEAD_FILE)}
    found = gradients_shown(before, after)
    hold_gradients("Gradients of the critic are not transformers'.", found, truth.gradients, dtype)


@dataclass(frozen=True)
class Truth:
    """What transformers computes, float32 on the host.

    Attributes:
        batch: Recorded trajectories with values before the update and with returns.
        values: float32 ``[T]``.
        gradients: float32, by the weights' names in files.
    """

    batch: RaggedBatch
    values: Tensor
    gradients: dict[str, Tensor]

    @classmethod
    def of(cls, directory: Path, head: Tensor, batch: RaggedBatch, dtype: torch.dtype) -> Truth:
        """Compute it, sequence by sequence.

        Args:
            directory: The trunk's.
            head: float32 ``[1, H]``.
            batch: B sequences, with ``loss_weights`` and ``token_shares``.
            dtype: What the trunk's weights are rounded to; the head's are not.
        """
        with quiet():
            model = load_model(directory, None, dtype)
        weight = head.clone().requires_grad_()
        found: list[Tensor] = []
        for tokens in batch.tokens.split(batch.lengths.tolist()):
            hidden = model.base_model(tokens[None], use_cache=False).last_hidden_state[0]
            found.append(torch.cat([torch.zeros(1), (hidden @ weight[0])[:-1]]))
        values = torch.cat(found)
        own, places = values.detach(), torch.arange(batch.num_tokens)
        before, returns = (own + offset[places % len(offset)] for offset in (_BEFORE, _RETURNS))
        batch = replace(batch, values=before, returns=returns)
        LOSS(TokenOutputs(values=values), batch).loss.backward()
        assert weight.grad is not None, "the value head's: transformers' values depend on it"
        named = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
        return cls(batch, own, {**published(model, named), HEAD: weight.grad})


def _write_critic(model: Path, directory: Path) -> Tensor:
    """Copy a model, and put a value head beside it."""
    shutil.copytree(model, directory)
    hidden = weights_of(model)["model.norm.weight"].numel()
    head = 0.1 * torch.randn(1, hidden, generator=torch.Generator().manual_seed(5))
    save_file({HEAD: head}, directory / HEAD_FILE)
    return head
