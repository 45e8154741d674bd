"""Compare what keeps experts equally busy with its definition: the load-balancing loss, and the routers' biases.

The loss is that of the Switch Transformer (https://arxiv.org/abs/2101.03961), as Megatron and transformers normalise
it: ``E * sum over experts of f * P``, with the fraction f of choices that fall on an expert and the mean P of its
probabilities. The biases are moved as in https://arxiv.org/abs/2408.15664: after each update, up where an expert had
fewer tokens than the mean, and down where it had more, by the same amount. transformers' routers compute both.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from anytron.base.errors import ResourceError
from anytron.base.results import Result, of_error
from anytron.proof.checks import Inapplicable
from anytron.proof.verification.comparisons import FACTORS, measured
from anytron.proof.verification.engines import plan_of
from anytron.proof.verification.gradients import compare_gradients, computed_gradients, frozen_reasons, frozen_weights
from anytron.proof.verification.hugging_face import (
    LOSS,
    computed_by_transformers,
    load_model,
    published,
    sequence_logits,
)
from anytron.proof.verification.prediction import NOTHING, engine_options, trains_modules
from anytron.proof.verification.sums import ALONE, copies_of_longest, prepared
from anytron.run.trainer.models import model_directory
from anytron.task.data.model_files import EXPERT_COUNTS
from anytron.task.data.pretrained import read_hf_config

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    from anytron.config.schema import RunConfig
    from anytron.run.trainer.workers import TrainingWorkers
    from anytron.sequences.batch import RaggedBatch

TOGETHER = 10**9
"""``max_tokens`` of a plan with as few micro-batches as possible."""
COPIES = 2
"""Copies of a sequence on each replica."""
BIAS = "e_score_correction_bias"
"""End of the names of biases that choose experts, in files."""
UPDATES = 2
"""Updates of biases that are compared: what happens once, before the first, shows beside the second."""
BIAS_LIMIT = 1e-2
"""Allowed error of a bias's step, as a part of the step."""
_METRICS = ("moe/load_balancing_loss", "moe/seq_load_balancing_loss")
_LAYER = re.compile(r"layers\.(\d+)\.")


@dataclass
class Routed:
    """What one of transformers' routers computed.

    Attributes:
        logits: float32 ``[T, E]``, with gradients.
        chosen: Experts that the layer uses, int64 ``[T, K]``.
        sigmoid: Whether scores are sigmoids of the logits, and not their softmax.
    """

    logits: Tensor
    chosen: Tensor
    sigmoid: bool

    def balance(self) -> Tensor:
        """The load-balancing loss of these tokens, 1 if all experts are equally busy."""
        tokens, experts = self.logits.shape
        scores = self.logits.sigmoid() if self.sigmoid else self.logits.softmax(-1)
        scores = scores / scores.sum(-1, keepdim=True)
        best = scores.topk(self.chosen.shape[1]).indices
        fractions = torch.bincount(best.flatten(), minlength=experts) / best.numel()
        return experts * torch.sum(fractions * scores.sum(0) / tokens)

    def load(self) -> Tensor:
        """The number of tokens of each expert, int64 ``[E]``."""
        return torch.bincount(self.chosen.flatten(), minlength=self.logits.shape[1])


@dataclass(frozen=True)
class ExpectedBalance:
    """Load-balancing loss and its gradients by their definition, float32 on the host.

    Attributes:
        loss: The mean over layers.
        gradients: Of the sum over layers, by the weights' names in files.
    """

    loss: float
    gradients: dict[str, Tensor]


@contextlib.contextmanager
def observed_routers(model: Any) -> Iterator[list[Routed]]:
    """Note what the routers of a model of transformers compute in the ``with`` block, in the order of their layers.

    Raises:
        Inapplicable: The model has no routers of transformers' usual form.
    """
    routers = [module for module in model.modules() if type(module).__name__.lower().endswith("topkrouter")]
    if not routers:
        raise Inapplicable("transformers' routers of this model have an unknown form")
    seen: list[Routed] = []
    scoring = getattr(model.config.get_text_config(), "scoring_func", None)

    def note(router: Any, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> None:
        rows = inputs[0].reshape(-1, router.weight.shape[1]).float()
        logits = functional.linear(rows, router.weight, getattr(router, "bias", None))
        sigmoid = hasattr(router, BIAS) if scoring is None else scoring == "sigmoid"
        seen.append(Routed(logits, outputs[2].reshape(len(rows), -1), sigmoid))

    with contextlib.ExitStack() as stack:
        for router in routers:
            stack.callback(router.register_forward_hook(note).remove)
        yield seen


def expected_balance(directory: Path, dtype: torch.dtype, sequence: RaggedBatch) -> ExpectedBalance:
    """Compute the load-balancing loss of one sequence, and its gradients.

    Args:
        directory: Directory of the model.
        dtype: Element type to which the weights are rounded before anything is computed with them, in float32.
        sequence: One sequence.

    Raises:
        ResourceError: The host has not enough memory.
        EngineError: transformers cannot run the model.
        Inapplicable: The model has no routers of transformers' usual form.
    """
    with computed_by_transformers(directory):
        model = load_model(directory, None, dtype)
        with observed_routers(model) as layers:
            sequence_logits(model, sequence)
        losses = torch.stack([layer.balance() for layer in layers])
        losses.sum().backward()
        named = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
        return ExpectedBalance(float(losses.detach().mean()), published(model, named))


def loads_of(directory: Path, dtype: torch.dtype, batch: RaggedBatch) -> list[Tensor]:
    """Count the tokens of each expert: int64 ``[E]`` for each layer with a router.

    Arguments and errors are those of :func:`expected_balance`, with several sequences.
    """
    with computed_by_transformers(directory), torch.no_grad():
        model, totals = load_model(directory, None, dtype), []
        for index in range(batch.num_sequences):
            with observed_routers(model) as layers:
                sequence_logits(model, batch.select(torch.tensor([index])))
            totals.append([layer.load() for layer in layers])
    return [torch.stack(each).sum(0) for each in zip(*totals, strict=True)]


def require_experts(config: RunConfig, *, exact: bool) -> None:
    """Skip a check of routers if the run has none, or freezes them.

    Args:
        config: Configuration of the run.
        exact: Whether the check needs routers that choose as transformers' do in float32.

    Raises:
        Inapplicable: The check does not apply.
    """
    text = read_hf_config(model_directory(config)).get_text_config()
    if not any(getattr(text, name, None) for name in EXPERT_COUNTS):
        raise Inapplicable("the model has no experts")
    if config.model.lora is not None:
        raise Inapplicable("the run trains adapters only (model.lora)")
    if exact and config.model.dtype != "float32":
        raise Inapplicable(f"routers choose other experts in {config.model.dtype}: verify with model.dtype=float32")


def check_balance(check: str, config: RunConfig, trainer: TrainingWorkers, batch: RaggedBatch) -> Result:
    """Compare the load-balancing loss of copies of one sequence, and its gradients, with the definition.

    Copies have the loss of one of them, however they are divided into micro-batches: each alone, and all in one.

    Args:
        check: Name of the check.
        config: Configuration of the run.
        trainer: The training ranks, whose engine declares ``gradients``; the check changes their weights.
        batch: Sampled responses with advantages.

    Raises:
        Inapplicable: The run adds no load-balancing loss, or transformers cannot compute it.
        EngineError: The engine or transformers cannot compute the gradients.
    """
    require_experts(config, exact=True)
    if trains_modules(config):
        raise Inapplicable("prediction modules have more routers, which transformers does not know")
    wanted, directory = _coefficient(config), Path(config.trainer.output_dir)
    batch = copies_of_longest(batch, COPIES * trainer.dp_size)
    plans = {
        "each copy in its own micro-batch": replace(plan_of(trainer, config), max_tokens=ALONE),
        "all copies in one micro-batch": replace(plan_of(trainer, config), max_tokens=TOGETHER),
    }
    results: list[Result] = []
    expected = None
    for how, plan in plans.items():
        given = prepared(trainer, config, plan, batch)
        assert given.advantages is not None
        given = replace(given, advantages=torch.zeros_like(given.advantages))
        found, _ = computed_gradients(trainer, plan, given, directory, NOTHING, additions="all")
        if wanted is None and not any(gradient.any() for gradient in found.values()):
            raise Inapplicable("the run adds no load-balancing loss")
        if expected is None:
            try:
                first = given.select(torch.tensor([0]))
                expected = expected_balance(model_directory(config), torch.float32, first)
            except ResourceError as error:
                return of_error(check, error, "skipped")
        results.append(_compare_balance(check, config, found, expected.gradients, wanted, how))
    failed = next((result for result in results if result.status == "failed"), None)
    if failed is not None:
        return failed
    assert expected is not None
    return _compare_metrics(results[-1], trainer.update(given, plan, NOTHING), expected.loss)


def _compare_balance(
    check: str,
    config: RunConfig,
    found: Mapping[str, Tensor],
    unscaled: Mapping[str, Tensor],
    coefficient: float | None,
    how: str,
) -> Result:
    frozen = frozen_weights(found, unscaled, config)
    shared = [name for name in unscaled if name in found]
    if coefficient is None:  # the engine's own; whatever it is, the gradients must be proportional
        products = sum(float((found[name].double() * unscaled[name].double()).sum()) for name in shared)
        coefficient = products / sum(float(unscaled[name].double().square().sum()) for name in shared)
    expected = {name: coefficient * gradient for name, gradient in unscaled.items() if name not in frozen}
    return compare_gradients(
        check,
        found,
        expected,
        dtype=config.model.dtype,
        skipped=frozen_reasons(frozen),
        what=f"gradients of {coefficient:.3g} times the load-balancing loss, {how}",
        whose="the definition's",
    )


def _compare_metrics(result: Result, metrics: Mapping[str, float], right: float) -> Result:
    """Compare the loss that an update reports with its definition, if it reports one."""
    for name in _METRICS:
        if name in metrics:
            detail = f"{name} is {metrics[name]:.6g}, by its definition {right:.6g}; {result.detail}"
            if not abs(metrics[name] - right) <= 10 * FACTORS["float32"] * max(1.0, right):
                return Result(result.name, "failed", detail)
            result = replace(result, detail=detail)
    return result


def _coefficient(config: RunConfig) -> float | None:
    """The coefficient of the load-balancing loss in the engine's options; None if they say nothing."""
    value = _transformer(config).get("moe_aux_loss_coeff")
    return None if not value else float(sum(value) if isinstance(value, list) else value)


def check_biases(check: str, config: RunConfig, trainer: TrainingWorkers, batch: RaggedBatch) -> Result:
    """Compare how updates move the biases that choose experts with the experts' numbers of tokens.

    Args:
        check: Name of the check.
        config: Configuration of the run.
        trainer: The training ranks; the check changes their weights.
        batch: Sampled responses with advantages.

    Raises:
        Inapplicable: The model has no such biases, or they are not moved.
        EngineError: transformers cannot run the model.
    """
    require_experts(config, exact=False)
    text = read_hf_config(model_directory(config)).get_text_config()
    if getattr(text, "aux_loss_alpha", None) == 0 or _transformer(config).get("moe_router_bias_update_rate") == 0:
        raise Inapplicable("the run does not move the biases that choose experts")
    biases = [_biases(trainer, config)]
    if not biases[0]:
        raise Inapplicable("the model has no biases that choose experts")
    plan = replace(plan_of(trainer, config), max_tokens=ALONE)
    count = trainer.dp_size * plan.multiple  # with fewer, copies would fill micro-batches up, and count
    index = torch.arange(-(-max(4, count) // count) * count) % batch.num_sequences
    batch = replace(batch, groups=None, responses=None).select(index)
    loads: Sequence[Tensor] = ()
    if config.model.dtype == "float32":
        try:
            loads = loads_of(model_directory(config), torch.float32, batch)
        except ResourceError as error:
            return of_error(check, error, "skipped")
    for _ in range(UPDATES):
        trainer.update(prepared(trainer, config, plan, batch), plan, LOSS)
        biases.append(_biases(trainer, config))
    return compare_biases(check, biases, loads)


def compare_biases(check: str, biases: Sequence[Sequence[Tensor]], loads: Sequence[Tensor]) -> Result:
    """Compare the steps of biases with the experts' numbers of tokens, and with each other.

    Args:
        check: Name of the check.
        biases: Biases ``[E]`` of each layer, before the first update and after each.
        loads: Tokens of each expert in the first update, int64 ``[E]``, of the first layers. Other steps are only
            compared in size.
    """
    moves = [
        later.double() - earlier.double()
        for before, after in itertools.pairwise(biases)
        for earlier, later in zip(before, after, strict=True)
    ]
    signs = [move.sign() for move in moves]
    for layer, load in enumerate(loads):
        signs[layer] = (load.double().mean() - load).sign()
    sizes = torch.cat([move.abs()[sign != 0] for move, sign in zip(moves, signs, strict=True)])
    what = f"biases of {len(biases[0])} routers in {len(biases) - 1} updates"
    if not sizes.any():
        return Result(check, "failed", f"the {what} do not move: the update of a bias is lost, or not made")
    step = float(sizes.median())
    errors = [
        float((move - step * sign).abs().max()) / max(step, 1e-12) for move, sign in zip(moves, signs, strict=True)
    ]
    worst = max(range(len(errors)), key=lambda number: errors[number])
    if errors[worst] <= BIAS_LIMIT:
        return measured(check, errors[worst], BIAS_LIMIT, f"{what} move by {step:.4g} towards equal loads")
    update, layer = divmod(worst, len(biases[0]))
    detail = (
        f"{what} must move by one amount, {step:.4g}, towards equal numbers of tokens, and router {layer}'s in "
        f"update {update + 1} are off by {errors[worst]:.2g} of it: look at what counts tokens, at passes outside of "
        "updates, and at the dtype of the biases, which must be float32"
    )
    return measured(check, errors[worst], BIAS_LIMIT, detail)


def _biases(trainer: TrainingWorkers, config: RunConfig) -> list[Tensor]:
    """Export the biases that choose experts, in the order of their layers."""
    from safetensors import safe_open

    file = Path(config.trainer.output_dir) / "biases.safetensors"
    trainer.export_weights(str(file))
    with safe_open(str(file), framework="pt") as opened:
        names = [name for name in opened.keys() if name.endswith(BIAS)]  # noqa: SIM118 - no mapping
        found = {name: opened.get_tensor(name) for name in names}
    file.unlink()
    return [found[name] for name in sorted(found, key=_layer_of)]


def _layer_of(name: str) -> int:
    match = _LAYER.search(name)
    return -1 if match is None else int(match[1])


def _transformer(config: RunConfig) -> dict[str, Any]:
    """The engine's options of its transformer."""
    return dict(engine_options(config).get("transformer") or {})
