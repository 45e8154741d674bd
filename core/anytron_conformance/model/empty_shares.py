"""The rule of level ``model`` about ranks without work."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from safetensors.torch import load_file

from anytron.device.platform import Feature
from anytron.proof.verification.empty_shares import TOGETHER, compute_share, empty_shares, mini_batch_of
from anytron.proof.verification.gradients import compare_gradients
from anytron.proof.verification.hugging_face import LOSS
from anytron.proof.verification.weights import tied_copies
from anytron_conformance.model.observed import (
    CONTEXT,
    CONTEXT_OF_FOUR,
    DEEPSEEK_V3,
    EXPERT,
    ONE,
    PADDED_CONTEXT,
    PIPELINE,
    QWEN3,
    QWEN3_MOE,
    QWEN3_NEXT,
    QWEN3_VL,
    REPLICAS,
    TENSOR,
    Family,
    Layout,
    Observer,
    recorded_of,
)
from anytron_conformance.model.parts import SHOWN, gradients_shown, hold_values, model_with_modules
from anytron_conformance.rules import Broken, Case, rule
from anytron_conformance.training_ranks import START_S, hold, said

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

    from anytron.config.schema import RunConfig
    from anytron.proof.verification.empty_shares import Computed, Share
    from anytron.run.trainer.workers import TrainingWorkers
    from anytron_conformance.subject import Subject


@dataclass(frozen=True)
class Trained:
    """The parts of a model that are trained.

    Attributes:
        words: Description, part of the case's name.
        sections: Sections of the configuration.
        needs: Features that the case requires and a platform may lack.
        modules: Whether the model has multi-token prediction modules.
    """

    words: str = ""
    sections: dict[str, dict[str, Any]] = field(default_factory=dict, hash=False)
    needs: tuple[Feature, ...] = ()
    modules: bool = False


WHOLE = Trained()
VISION_TOWER = Trained(", vision tower only", {"model": {"freeze": ["language_model", "aligner"]}})
ONE_STAGE = Trained(
    ", adapters on one stage", {"model": {"lora": {"rank": 4, "targets": ["linear_qkv"]}}}, (Feature.ADAPTERS,)
)
"""In a Qwen3-Next of four layers, only the last layer has a ``linear_qkv``: the first of two stages trains nothing."""
MODULES = Trained(
    ", prediction modules",
    {"engine": {"options": {"mtp_loss_coefficient": 1.0, "mtp_detach": False}}},
    (Feature.MULTI_TOKEN_PREDICTION,),
    modules=True,
)
MOST_CONTEXT = 4
"""Context-parallel ranks of the kit's largest layout; some sequences get fewer tokens than this."""


def _cases() -> list[Case]:
    listed = (
        (QWEN3, WHOLE, (ONE, CONTEXT, PADDED_CONTEXT, CONTEXT_OF_FOUR, TENSOR, PIPELINE, REPLICAS)),
        (QWEN3_MOE, WHOLE, (ONE, EXPERT)),
        (QWEN3_NEXT, WHOLE, (CONTEXT,)),
        (QWEN3_NEXT, ONE_STAGE, (PIPELINE,)),
        (DEEPSEEK_V3, MODULES, (ONE, CONTEXT, PIPELINE, EXPERT)),
        (QWEN3_VL, WHOLE, (REPLICAS, CONTEXT)),
        (QWEN3_VL, VISION_TOWER, (REPLICAS,)),
    )
    every = [(family, trained, layout) for family, trained, layouts in listed for layout in layouts]
    return [
        Case(
            f"{family.title}{trained.words}, {layout.name}",
            (family, layout, trained),
            size,
            (*family.needs, *layout.needs, *trained.needs),
        )
        for size, (family, trained, layout) in enumerate(every)
    ]


@rule(
    "empty-shares",
    "model",
    "Ranks without work take part: log-probs, gradients, updates and exports equal one rank's.",
    cases=_cases(),
    limit_s=START_S,
)
def with_empty_shares(subject: Subject, case: Case) -> None:
    """Compute log-probs, gradients, an update and an export while some rank, stage, replica or expert has no work.

    The cases are: sequences of one token, and of fewer tokens than there are context-parallel ranks, one in each
    micro-batch and all in one pack; a replica that runs fillers only, or has no image; experts without tokens;
    prediction modules without targets; a pipeline stage without trainable weights. The expected results are those of
    one rank that computes all sequences in one pack. A rank that skips parts without work also skips the collectives
    there, and the others wait for it: the rule then fails at its time limit.
    """
    family, layout, trained = case.values
    observer = Observer.of(subject)
    expected = observer.once(
        ("shares in one pack", family, trained), lambda: _computed(observer, family, trained, ONE, TOGETHER)
    )
    found = _computed(observer, family, trained, layout)
    for name, computed in found.shares.items():
        right = expected.shares[name]
        hold_values(f"Log-probs differ from one rank's: {name}.", computed.log_probs, right.log_probs, found.dtype)
        _hold(f"Gradients differ from one rank's: {name}.", computed.gradients, right.gradients, found.dtype)
    _hold("An update changes the weights differently than on one rank.", found.moved, expected.moved, found.dtype)


def _hold(what: str, found: Mapping[str, Tensor], expected: Mapping[str, Tensor], dtype: str) -> None:
    if not any(gradient.any() for gradient in expected.values()):
        moving = [name for name, gradient in found.items() if gradient.any()]
        if moving:
            raise Broken(what, f"on one rank all are 0, but {len(moving)} are not 0 here, first {moving[0]}")
        return
    unknown = found.keys() - expected.keys() - tied_copies(found, expected)
    reasons = {f"unknown to one rank ({', '.join(sorted(unknown))})": len(unknown)}
    hold(
        compare_gradients("", found, expected, dtype=dtype, skipped=reasons, what="parameters", whose="one rank's"),
        what,
    )


@dataclass(frozen=True)
class _Outcome:
    """What a layout computes from each share, by name, and the gradients that an update on the first share shows."""

    dtype: str
    shares: dict[str, Computed]
    moved: dict[str, Tensor]


def _computed(
    observer: Observer, family: Family, trained: Trained, layout: Layout, max_tokens: int | None = None
) -> _Outcome:
    """Let a layout compute all shares; ``max_tokens`` replaces the limit of each share."""
    sections = {**trained.sections, "optimizer": dict(SHOWN)}
    model = model_with_modules(observer, family) if trained.modules else None
    config, trainer = observer.build(family, layout, sections, model)
    shares = [
        replace(one, max_tokens=max_tokens or one.max_tokens) for one in empty_shares(recorded_of(family), MOST_CONTEXT)
    ]
    with said():
        computed = {one.name: compute_share(one, trainer, config, observer.output) for one in shares}
        return _Outcome(config.model.dtype, computed, _moved(shares[0], trainer, config, observer.output))


def _moved(share: Share, trainer: TrainingWorkers, config: RunConfig, directory: Path) -> dict[str, Tensor]:
    """Do an update, which changes the weights, and return the gradients that it shows."""
    batch, _, plan = mini_batch_of(share, trainer, config)
    before, after = directory / "before.safetensors", directory / "after.safetensors"
    trainer.export_weights(str(before))
    trainer.update(batch, plan, LOSS)
    trainer.export_weights(str(after))
    return gradients_shown(load_file(before), load_file(after))
