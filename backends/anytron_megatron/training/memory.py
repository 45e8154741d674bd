"""Free the device's memory: move what generation does not need to the host and back, or release whole models."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from anytron.workers.engines.device_memory import Parked

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from torch import Tensor, nn

    from anytron.config.running import Offloadable
    from anytron.device.runtime import DeviceRuntime
    from anytron_megatron.training.trained_model import TrainedModel


_ACTIVATIONS = "transformers.activations"


class Offload:
    """Moves parts of the training state between the device and the host.

    Args:
        parts: ``engine.offload``.
        trained: The models with optimizers.
        frozen: Modules of models that are not trained, by their name in ``engine.offload``.
        runtime: The device.
    """

    def __init__(
        self,
        parts: Collection[Offloadable],
        trained: Sequence[TrainedModel],
        frozen: Mapping[str, Sequence[nn.Module]],
        runtime: DeviceRuntime,
    ) -> None:
        self._parts, self._trained, self._frozen, self._runtime = parts, trained, frozen, runtime
        self._parked: Parked | None = None

    def begin(self) -> int:
        """Move or drop the configured parts to free the device's memory; return the number of bytes freed."""
        self.end()
        kept: Iterator[Tensor] = iter(())
        dropped: Iterator[Tensor] = iter(())
        if "optimizer" in self._parts:
            kept = chain(kept, *(model.optimizer_memory() for model in self._trained))
        for module in chain.from_iterable(self._frozen[part] for part in self._frozen.keys() & self._parts):
            kept = chain(kept, module.parameters(), module.buffers())
        if "gradients" in self._parts:
            dropped = chain(dropped, *(model.gradient_memory() for model in self._trained))
        self._runtime.synchronize()
        self._parked = Parked(kept, dropped, pin=self._runtime.can_pin_memory())
        self._runtime.empty_cache()
        return self._parked.num_bytes

    def end(self) -> None:
        """Move the parts back from the host."""
        if self._parked is not None:
            self._parked.take_back()
            self._parked = None


def release_memory(models: Iterable[nn.Module]) -> None:
    """Clear the attributes of all modules of some models; the models cannot be used afterwards.

    Dropping the last reference to a model is not enough. A token dispatcher keeps tensors of its last pass; their
    graph ends in gradient accumulators, whose hooks keep the data-parallel wrapper, which keeps the model: a cycle
    through autograd's graph, which the garbage collector does not see. And rotary embeddings, which hold their
    process group, are keys of a cache of their class (``RotaryEmbedding.forward``). Over gloo each group that is left
    behind costs three threads, one of which wakes up a hundred times a second.

    Activation functions stay as they are: they hold nothing, and transformers shares some between all models
    (``gelu_pytorch_tanh``, in MiniCPM-V's tower).
    """
    modules = [module for model in models for module in model.modules()]
    for module in modules:
        if type(module).__module__ != _ACTIVATIONS:
            vars(module).clear()
