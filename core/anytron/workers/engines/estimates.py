"""Estimates from a configuration alone: device memory, and the floating-point operations of training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from anytron.config.schema import RunConfig

BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2}
"""Bytes of one number, by ``model.dtype``."""
Phase = Literal["training", "generation", "scoring"]
"""Phases of a step. In ``scoring``, between generation and training, a reward model scores the responses."""
When = Literal["always"] | Phase
"""When memory is in use: ``always``, or only in one phase of each step."""


@dataclass(frozen=True)
class MemoryPart:
    """A part of the contents of device memory.

    Attributes:
        name: Name of the part.
        size: Bytes on the rank that has the most.
        how: How ``size`` was computed, with numbers.
        when: The phase in which the part takes memory, or ``always``.
        exact: Whether ``size`` is exact, except for the allocator's rounding; False = an estimate.
    """

    name: str
    size: int
    how: str
    when: When = "always"
    exact: bool = False

    def __str__(self) -> str:
        about = "" if self.exact else "about "
        when = "" if self.when == "always" else f", during {self.when}"
        return f"{about}{readable(self.size)}{when}: {self.how}"


@dataclass(frozen=True)
class TrainingEstimate:
    """The memory of a training rank.

    Attributes:
        parts: Parts on the rank that needs the most.
        parameters: Number of parameters of the whole model, on all ranks together.
        config: The Hugging Face config of the language model.
    """

    parts: tuple[MemoryPart, ...]
    parameters: int
    config: Mapping[str, Any]


class EstimatesTraining(Protocol):
    """The type of a training engine's ``EngineInfo.memory``: the function that estimates a rank's memory."""

    def __call__(self, run: RunConfig) -> TrainingEstimate:
        """Estimate a rank's memory from the configuration alone.

        Raises:
            ConfigError: The sizes of the model are not known.
        """


@dataclass(frozen=True)
class DeviceMemory:
    """The facts about a device on which an estimate of memory depends.

    Attributes:
        total: Size of the device's memory in bytes; None = not known.
        accelerator: Whether the device is an accelerator; False = the CPU, which uses the machine's memory.
    """

    total: int | None
    accelerator: bool


class EstimatesRollout(Protocol):
    """The type of a rollout engine's ``EngineInfo.memory``: the function that estimates a replica's memory."""

    def __call__(self, run: RunConfig, training: TrainingEstimate, device: DeviceMemory) -> Sequence[MemoryPart]:
        """Estimate the memory that a replica takes on one device.

        Args:
            run: The configuration.
            training: Estimate of the training engine, which has the model's sizes.
            device: The replica's device.
        """


def peak(parts: Sequence[MemoryPart]) -> int:
    """Return the peak in bytes: the parts that are ``always`` there, plus the parts of the largest phase."""

    def held(when: When) -> int:
        return sum(part.size for part in parts if part.when == when)

    return held("always") + max(map(held, get_args(Phase)))


def key_value_elements(config: Mapping[str, Any]) -> int:
    """Count the numbers that a cache of keys and values holds for one token, over all layers with attention.

    For latent attention, the cache holds the latent vector and the rotated part of the key, as in transformers and
    vLLM.
    """
    layers = config.get("num_hidden_layers", 0)
    if kinds := config.get("layer_types"):
        layers = sum("linear" not in str(kind) for kind in kinds)
    heads = config.get("num_attention_heads", 0)
    if config.get("kv_lora_rank"):
        return int(layers * (config["kv_lora_rank"] + config.get("qk_rope_head_dim", 0)))
    size = config.get("head_dim") or (config.get("hidden_size", 0) // heads if heads else 0)
    return int(layers * 2 * (config.get("num_key_value_heads") or heads) * size)


def readable(size: float) -> str:
    """Format a number of bytes for display, in GiB or MiB."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.2f} MiB"


@dataclass(frozen=True)
class AttentionLayers:
    """Layers of one kind of attention.

    Attributes:
        width: Number of heads times head size, summed over the layers; the head size is the mean of key and value
            sizes.
        window: Number of tokens that a token sees, itself included; None = all tokens before it.
    """

    width: float
    window: int | None = None

    def pairs(self, length: int) -> float:
        """Count the attended (query, key) pairs of a sequence of ``length`` tokens.

        Without a window these are length^2 / 2, because a token's pair with itself counts half.
        """
        if self.window is None or self.window >= length:
            return length**2 / 2
        return self.window * length - self.window**2 / 2


@dataclass(frozen=True)
class ModelFlops:
    """The sizes of a model that determine the floating-point operations of an update.

    A pass forward and backward through a matrix takes 6 operations for each of its numbers and each token: a
    multiplication and an addition in the forward pass, twice as many in the backward pass, for the gradient of the
    input and that of the matrix (Chowdhery et al., PaLM, arXiv:2204.02311, appendix B; Narayanan et al.,
    arXiv:2104.04473, appendix). Attention takes 12 L H Q operations for each pair of a query and a key (L layers,
    H heads, head size Q; the same appendix B), and a causal model has only the pairs of a token with itself and with
    earlier tokens.

    Attributes:
        weights: Number of elements of all matrices that multiply a token's hidden state. Of the experts,
            only the ones that process the token are counted. The output layer is counted, the embedding is not,
            because it is a lookup.
        attention: The model's layers with attention. Linear attention is left out, because its state needs few
            operations compared with its matrices.
        trained: Whether the model's own weights are trained. False = adapters are trained (LoRA), and no gradients of
            the matrices are computed: 4 operations instead of 6. The operations of the adapters themselves are left
            out.
    """

    weights: float
    attention: tuple[AttentionLayers, ...]
    trained: bool = True

    def update(self, lengths: Sequence[int]) -> float:
        """Count the operations of an update, forward and backward, if each sequence is computed once and separately.

        Additional work of an implementation, such as recomputed activations or padding, is not counted. Operations that
        are saved by sharing a prompt among its samples are not subtracted.

        Args:
            lengths: Tokens of each sequence, prompt included.
        """
        pairs = sum(layers.width * layers.pairs(length) for layers in self.attention for length in lengths)
        return (6 if self.trained else 4) * self.weights * sum(lengths) + 12 * pairs


class CountsFlops(Protocol):
    """The type of ``EngineInfo.flops``: the function with which a training engine counts operations."""

    def __call__(self, run: RunConfig) -> tuple[ModelFlops, ModelFlops | None]:
        """Describe the policy and the critic, if there is one, from the configuration alone.

        Raises:
            ConfigError: The sizes of the model are not known.
        """
