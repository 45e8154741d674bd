"""The random adapters of the tests of LoRA."""

from tests.backends.megatron.lora.conftest import random_adapter

__all__ = ["random_adapter"]
