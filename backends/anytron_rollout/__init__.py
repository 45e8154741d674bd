"""The rollout engine that generates with Hugging Face transformers, and the parts of it that other servers use."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from anytron_rollout.generation import build_model, generate
    from anytron_rollout.weights import load_verified
else:

    def __getattr__(name: str) -> object:
        from anytron.base.lazy import find

        return find(__name__, name)


__all__ = ["build_model", "generate", "load_verified"]
