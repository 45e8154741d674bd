"""Compute logits, and the gradients of the policy's loss, with transformers: float32, on the host, in the driver.

The driver has no training engine, no platform and no patches that could change these results.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from anytron.algorithms.policy_loss import PolicyLoss
from anytron.base.errors import EngineError, ResourceError
from anytron.config.algorithm import AlgorithmSection
from anytron.proof.verification.weights import stored_weights
from anytron.sequences.batch import TokenOutputs, token_index
from anytron.task.data.model_files import composite
from anytron.task.data.pretrained import (
    logits_config,
    model_class,
    read_hf_config,
    take_latent_epsilon,
    turned_in_files,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from anytron.sequences.batch import RaggedBatch


@contextlib.contextmanager
def forced_routing(model: Any, routing: Tensor | None) -> Iterator[None]:
    """Send tokens to given experts inside the ``with`` block; the experts' weights come from the model's own scores.

    Args:
        model: A model of transformers.
        routing: Experts of one sequence, as in a batch: ``[T, L, K]`` for T tokens, L layers with routers and K experts
            per token. The routers choose the experts of the last token themselves, because no engine returns these.
            None = the routers choose for every token.

    Raises:
        ValueError: The number of the model's routers is not L.
    """
    if routing is None:
        yield
        return
    routers = [module for module in model.modules() if type(module).__name__.lower().endswith("topkrouter")]
    if len(routers) != routing.shape[1]:
        raise ValueError(f"the routing has {routing.shape[1]} layers, and the model has {len(routers)} routers")
    for router, experts in zip(routers, routing.long().unbind(1), strict=True):
        router.forward = _choosing(router.forward, experts, router.weight.shape[0])
    try:
        yield
    finally:
        for router in routers:
            del router.forward


def _choosing(forward: Callable[..., Any], experts: Tensor, count: int) -> Callable[..., Any]:
    """Wrap the ``forward`` of a router with ``count`` experts: it chooses these, ``[T, K]``, and weighs them itself."""

    def chosen(*args: Any, **kwargs: Any) -> Any:
        with _Choice(experts, count):
            return forward(*args, **kwargs)

    return chosen


class _Choice(TorchFunctionMode):
    """Replaces the result of ``topk`` over all experts; groups of experts are chosen over other dimensions."""

    def __init__(self, experts: Tensor, count: int) -> None:
        super().__init__()
        self._experts, self._count = experts, count

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, torch.Tensor.topk) or args[0].ndim != 2 or args[0].shape[1] != self._count:
            return result
        chosen = torch.cat([self._experts[:-1], result.indices[-1:]])
        return torch.return_types.topk((args[0].gather(1, chosen), chosen))


_CHOOSING_BIAS = ".e_score_correction_bias"
"""End of the names of biases that choose experts, and get no gradient: ERNIE-4.5's are parameters in transformers."""

LOSS = PolicyLoss(AlgorithmSection(kl_coefficient=0.1, entropy_coefficient=1.0))
"""The policy's loss with all of its terms, whatever the run's coefficients, so that an error in any term shows."""

_OLD = torch.tensor([-0.4, -0.1, 0.05, 0.35])
"""Logarithms of the ratios to the old policy, in turn: on both sides of both clip bounds, and far from these."""
_REFERENCE = torch.tensor([0.3, -0.2, 0.15])
"""The reference's log-probs less the model's, in turn."""
_BYTES_PER_PARAMETER = 12
"""A weight and its gradient in float32, and the weight in the file while it is loaded."""


@dataclass(frozen=True)
class ExpectedGradients:
    """Log-probs and gradients that transformers computes.

    Attributes:
        batch: The given batch, with old and reference log-probs that differ slightly from the model's.
        log_probs: float32 ``[T]``, 0 for tokens that are in no response.
        gradients: float32, of :data:`LOSS` on this batch, by the weights' names in the model's directory.
    """

    batch: RaggedBatch
    log_probs: Tensor
    gradients: dict[str, Tensor]


def expected_gradients(
    directory: Path, weights: Path | None, dtype: torch.dtype, batch: RaggedBatch
) -> ExpectedGradients:
    """Compute the gradients of the policy's loss, sequence by sequence.

    Args:
        directory: Directory of the model.
        weights: safetensors file of the weights; None = those in the directory.
        dtype: Element type to which the weights are rounded before anything is computed with them, in float32.
        batch: B sequences, with ``advantages``, ``loss_weights`` and ``token_shares``; if it has ``routing``, the
            routers choose these experts.

    Raises:
        ResourceError: The host has not enough memory.
        EngineError: transformers cannot run the model.
        ConfigError: The model's config is malformed, or transformers does not know the model.
    """
    with computed_by_transformers(directory):
        return _computed(load_model(directory, weights, dtype), batch)


def expected_logits(directory: Path, dtype: torch.dtype, batch: RaggedBatch) -> Tensor:
    """Compute whole logits, float32 ``[T, V]``: row t predicts the token after token t.

    Args:
        directory: Directory of the model.
        dtype: Element type to which the weights are rounded before anything is computed with them, in float32.
        batch: T tokens. Routers choose freely, also if it has ``routing``.

    Raises:
        ResourceError: The host has not enough memory.
        ConfigError: The model's config is malformed, or transformers does not know the model.
    """
    with quiet(), torch.no_grad():
        model = load_model(directory, None, dtype)
        return torch.cat(
            [sequence_logits(model, batch.select(torch.tensor([index]))) for index in range(batch.num_sequences)]
        )


def _computed(model: Any, batch: RaggedBatch) -> ExpectedGradients:
    ratios = _repeated(_OLD, batch), _repeated(_REFERENCE, batch)
    recorded: list[Tensor] = []
    for index in range(batch.num_sequences):
        sequence = torch.tensor([index])
        one, tokens = batch.select(sequence), token_index(batch.lengths, sequence)
        outputs = _token_outputs(model, one)
        assert outputs.log_probs is not None
        recorded.append(outputs.log_probs.detach())
        LOSS(outputs, _with_recorded(one, recorded[-1], *(ratio[tokens] for ratio in ratios))).loss.backward()
    named = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in model.named_parameters()
        if not name.endswith(_CHOOSING_BIAS)
    }
    log_probs = torch.cat(recorded)
    return ExpectedGradients(off_policy(batch, log_probs), log_probs, published(model, named))


def load_model(
    directory: Path, weights: Path | None, dtype: torch.dtype, layers_more: int = 0, *, scores: bool = False
) -> Any:
    """Load a model for comparisons, in float32 on the host.

    Args:
        directory: Directory of the model.
        weights: safetensors file of the weights; None = those in the directory.
        dtype: Element type to which the weights are rounded.
        layers_more: Number of layers behind the model's last layer that are loaded too (MTP modules).
        scores: Whether to load a sequence classifier, such as a reward model, instead of a language model.

    Raises:
        ResourceError: The host has not enough memory.
        ConfigError: The model's config is malformed, or transformers does not know the model.
    """
    from safetensors.torch import load_file
    from transformers import AutoModelForSequenceClassification

    config = logits_config(read_hf_config(directory))
    if layers_more:
        config.num_hidden_layers += layers_more
    with torch.device("meta"):
        empty = (AutoModelForSequenceClassification if scores else model_class(config)).from_config(config)
    count = sum(parameter.numel() for parameter in empty.parameters())
    needed, available = count * _BYTES_PER_PARAMETER, available_memory()
    if needed > available:
        raise ResourceError(
            "The host's memory is too small for the model and its gradients in float32.",
            where=str(directory),
            why=f"{count / 1e9:.3g} billion parameters need {needed / 1e9:.3g} GB; {available / 1e9:.3g} GB are free",
            fix="free memory, use a machine that has more, or verify a smaller model of the same architecture",
        )
    given: dict[str, Any] = {} if weights is None else {"state_dict": load_file(weights)}
    if weights is None and composite(directory) is not None:
        given = {"state_dict": stored_weights(directory)}
    origin = None if given else directory
    model = type(empty).from_pretrained(
        origin, config=config, dtype=dtype, local_files_only=True, use_safetensors=True, **given
    )
    take_latent_epsilon(model)
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            # The padding token's row would get no gradient from inputs, and many chat models end messages with it.
            module.padding_idx = None
    return model.float().eval()


@contextlib.contextmanager
def computed_by_transformers(directory: Path) -> Iterator[None]:
    """Silence transformers in the ``with`` block, and turn its exceptions into errors that name the model.

    Raises:
        EngineError: transformers cannot run the model.
    """
    try:
        with quiet():
            yield
    except (RuntimeError, ValueError, TypeError, KeyError, AttributeError, NotImplementedError) as error:
        raise EngineError(
            "transformers cannot run this model.",
            where=str(directory),
            why=f"{type(error).__name__}: {error}",
            fix="install a release of transformers that supports this model (anytron doctor lists the allowed ones)",
        ) from error


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress transformers' messages about weights that a model lacks and kernels that are not installed."""
    from transformers.utils import logging as hf_logging

    hf_logging.disable_progress_bar()
    before = hf_logging.get_verbosity()
    hf_logging.set_verbosity_error()
    try:
        yield
    finally:
        hf_logging.set_verbosity(before)


def available_memory() -> int:
    """Available memory of the host, in bytes."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):  # not Linux
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _token_outputs(model: Any, sequence: RaggedBatch) -> TokenOutputs:
    """Compute log-probs and entropies of one sequence, float32 ``[T]``, with gradients; 0 outside of its response."""
    with forced_routing(model, sequence.routing):
        logits = sequence_logits(model, sequence)
    places = sequence.response_mask.nonzero()[:, 0]
    places = places[places > 0]
    scores = (logits[places - 1] / sequence.temperature).log_softmax(-1)
    log_probs = scores.gather(1, sequence.tokens[places][:, None])[:, 0]
    entropy = -(scores.exp() * scores).sum(-1)
    nothing = torch.zeros(sequence.num_tokens)
    return TokenOutputs(nothing.index_put((places,), log_probs), nothing.index_put((places,), entropy))


def sequence_logits(model: Any, sequence: RaggedBatch) -> Tensor:
    """Compute one sequence's logits, float32 ``[T, V]``, with gradients."""
    input_ids = sequence.tokens[None]
    images = {} if sequence.images is None else _image_arguments(model, sequence, input_ids)
    logits: Tensor = model(input_ids, use_cache=False, **images).logits[0]
    return logits.float()


def _image_arguments(model: Any, sequence: RaggedBatch, input_ids: Tensor) -> dict[str, Tensor]:
    assert sequence.images is not None
    types = {"mm_token_type_ids": (input_ids == model.config.image_token_id).int()}
    patches = sequence.images[0]
    if patches is None:
        return types
    return {**types, "pixel_values": patches.pixel_values.float(), "image_grid_thw": patches.grid_thw}


def _repeated(values: Tensor, batch: RaggedBatch) -> Tensor:
    return values[torch.arange(batch.num_tokens) % len(values)]


def off_policy(batch: RaggedBatch, log_probs: Tensor) -> RaggedBatch:
    """Return the batch with old and reference log-probs that differ slightly from those of the model.

    Args:
        batch: T tokens.
        log_probs: float32 ``[T]``, those of the model that is trained.
    """
    return _with_recorded(batch, log_probs, _repeated(_OLD, batch), _repeated(_REFERENCE, batch))


def _with_recorded(batch: RaggedBatch, log_probs: Tensor, old: Tensor, reference: Tensor) -> RaggedBatch:
    mask = batch.response_mask
    return replace(batch, old_log_probs=(log_probs - old) * mask, reference_log_probs=(log_probs + reference) * mask)


def published(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Give a model's tensors the names and the orientation in published files, and split tensors as the files do."""
    from transformers.core_model_loading import revert_weight_conversion

    converted: dict[str, Tensor] = revert_weight_conversion(model, tensors)
    turned = turned_in_files(model)
    return {name: tensor.mT.contiguous() if name in turned else tensor for name, tensor in converted.items()}
