"""The experts of a response's tokens, as vLLM has recorded them (``rollout.replay_routing``). Imports no vLLM.

At the first token of a response, vLLM records the experts of the whole prompt; then the experts of each token, when it
draws the next one. Tokens in the prefix cache have the experts with which they were computed. A response that vLLM
computes again, because its cache was full or the weights have changed, keeps the first record: the experts with which
its tokens were drawn (vllm/v1/core/sched/scheduler.py, ``update_from_output``, 0.23 to 0.30).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from anytron.workers.engines.rollout_engine import RoutingShape

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

_EXPERTS = re.compile(r"\.layers\.(\d+)\.mlp\.experts\.")


class RecordedRouting:
    """Reads the experts of responses from vLLM.

    Args:
        llm_engine: vLLM's ``LLMEngine``.
        names: The names of the model's weights in transformers: layers with experts have weights ``mlp.experts``.
    """

    def __init__(self, llm_engine: Any, names: Iterable[str]) -> None:
        self._processor = llm_engine.output_processor
        self._layers = sorted({int(found[1]) for found in map(_EXPERTS.search, names) if found})
        self._experts = int(llm_engine.model_config.get_num_experts())

    def of_ended(self, output: Any) -> Tensor | None:
        """Return the routing of a response that vLLM has ended, from its last output; None if vLLM recorded none."""
        return self._arranged(output.routed_experts)

    def of_running(self, number: str) -> Tensor | None:
        """Return the routing of a response so far, which vLLM gives away with the last output only.

        Args:
            number: The request's number in vLLM.
        """
        (request,) = self._processor.external_req_ids[number]
        chunks = self._processor.request_states[request].routed_experts_chunks
        return self._arranged(np.concatenate(chunks) if chunks else None)

    def _arranged(self, recorded: np.ndarray[Any, Any] | None) -> Tensor | None:
        """Take the layers that have experts: ``[tokens, layers, K]`` of all layers, zeros for the others."""
        if recorded is None:
            return None
        shape = RoutingShape(len(self._layers), recorded.shape[-1], self._experts)
        return torch.from_numpy(recorded[:, self._layers]).to(shape.dtype)
