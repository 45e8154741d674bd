"""The rollout engine that generates with vLLM."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from anytron.task.data.model_files import has_experts
    from anytron_vllm.checks import model_config
    from anytron_vllm.installation import Installation, find_installation
else:

    def __getattr__(name: str) -> object:
        from anytron.base.lazy import find

        return find(__name__, name)


__all__ = ["Installation", "find_installation", "has_experts", "model_config"]
