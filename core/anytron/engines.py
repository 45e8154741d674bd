"""Public names for authors of engines: the description of an engine, and the requests and responses of rollouts."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from anytron.base.components import Component, EngineInfo
    from anytron.base.seeds import derive_seed
    from anytron.task.data.pretrained import load_hf_config, read_hf_config
    from anytron.workers.engines.estimates import TrainingEstimate
    from anytron.workers.engines.rollout_engine import GenerationRequest, PromptInputs, Response, SamplingParams
    from anytron.workers.engines.sampling import RequestQueue
    from anytron.workers.weights.transfer import Piece
else:

    def __getattr__(name: str) -> object:
        from anytron.base.lazy import find

        return find(__name__, name)


__all__ = [
    "Component",
    "EngineInfo",
    "GenerationRequest",
    "Piece",
    "PromptInputs",
    "RequestQueue",
    "Response",
    "SamplingParams",
    "TrainingEstimate",
    "derive_seed",
    "load_hf_config",
    "read_hf_config",
]
