"""Keep to which experts a model sends tokens while it generates.

Legend: B rows, S columns of the prompt, W generated columns, L mixture-of-experts layers, K experts of a token.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from anytron.base.errors import EngineError
from anytron.workers.engines.rollout_engine import RoutingShape

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor, nn

    from anytron.workers.engines.rollout_engine import PromptInputs, Response

EXPERTS = ".mlp.experts"
"""How the names of modules end that are called with (hidden states ``[N, H]``, experts ``[N, K]``, weights ``[N, K]``):
what a layer's tokens are sent to, however its router has chosen."""


class RoutingRecorder:
    """Tells the routing of one model.

    Args:
        model: A Hugging Face model of a type that the checks let through.

    Raises:
        EngineError: It has no experts where this version of transformers should have them.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._experts: list[Any] = [module for name, module in model.named_modules() if name.endswith(EXPERTS)]
        if not self._experts:
            raise _unknown(f"it has no module whose name ends with {EXPERTS}")

    @contextlib.contextmanager
    def recording(self) -> Iterator[list[Tensor]]:
        """Give a list that gets the experts of each forward pass: ``[B * columns, L, K]`` on the host."""
        steps: list[Tensor] = []
        layers: list[Tensor] = []

        def note_layer(experts: nn.Module, arguments: tuple[Any, ...]) -> None:
            chosen = arguments[1] if len(arguments) > 1 else None
            if not isinstance(chosen, torch.Tensor) or chosen.is_floating_point() or chosen.ndim != 2:
                raise _unknown(f"{type(experts).__name__} is not called with the experts of each token")
            layers.append(chosen)

        def note_step(*_: Any) -> None:
            shape = RoutingShape(len(layers), layers[0].shape[1], self._experts[0].num_experts)
            device = layers[-1].device  # layers may lie on several
            steps.append(torch.stack([layer.to(device, shape.dtype) for layer in layers], dim=1).cpu())
            layers.clear()

        with contextlib.ExitStack() as hooks:
            for module in self._experts:
                hooks.callback(module.register_forward_pre_hook(note_layer).remove)
            hooks.callback(self._model.register_forward_hook(note_step).remove)
            yield steps


def with_routing(
    responses: Sequence[Response], prompts: Sequence[PromptInputs], passes: Sequence[Tensor]
) -> list[Response]:
    """Give each response of a batch its routing.

    Args:
        responses: B responses.
        prompts: Theirs; the batch had them padded to the left.
        passes: What :meth:`RoutingRecorder.recording` has given. The last column has been through none.
    """
    rows = torch.cat([step.view(len(responses), -1, *step.shape[1:]) for step in passes], dim=1)  # [B, S + W - 1, L, K]
    width = max(len(prompt.tokens) for prompt in prompts)
    return [
        replace(response, routing=row[width - len(prompt.tokens) : width + len(response.tokens) - 1])
        for response, prompt, row in zip(responses, prompts, rows, strict=True)
    ]


def _unknown(why: str) -> EngineError:
    return EngineError(
        "The rollout engine cannot record the routing of this model.",
        where="rollout.replay_routing",
        why=f"{why}, in this version of transformers",
        fix="leave rollout.replay_routing out, or install the version in constraints/",
    )
