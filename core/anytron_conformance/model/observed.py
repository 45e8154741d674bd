"""The tiny models and their layouts, and the results of the training engine under test and of transformers for them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import torch

from anytron.device.platform import Feature
from anytron.proof.verification.engines import OTHER_TEMPERATURE, first_sequences, observe_forward, plan_of
from anytron.proof.verification.gradients import computed_gradients
from anytron.proof.verification.hugging_face import expected_gradients, expected_logits
from anytron_conformance.recorded import recorded, recorded_images
from anytron_conformance.rules import Broken, Case
from anytron_conformance.tiny_models import write_tiny_model
from anytron_conformance.training_ranks import TrainingRanks, said, usual_format

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Mapping
    from pathlib import Path

    from torch import Tensor

    from anytron.config.schema import RunConfig
    from anytron.proof.verification.engines import Forward
    from anytron.run.trainer.workers import TrainingWorkers
    from anytron.sequences.batch import RaggedBatch
    from anytron_conformance.subject import Subject


Kept = TypeVar("Kept")


@dataclass(frozen=True)
class Truth:
    """Results of transformers, float32 on the host, with weights rounded to the dtype of the run.

    Attributes:
        batch: Recorded trajectories.
        logits: Logits of the first sequences, float32 ``[T', V]``.
        gradients: Gradients of the loss of all sequences, float32, by the weights' names in the model's files.
    """

    batch: RaggedBatch
    logits: Tensor
    gradients: dict[str, Tensor]

    @classmethod
    def of(cls, model: Path, batch: RaggedBatch, dtype: torch.dtype) -> Truth:
        """Compute a model's results with transformers."""
        expected = expected_gradients(model, None, dtype, replace(batch, temperature=OTHER_TEMPERATURE))
        return cls(expected.batch, expected_logits(model, dtype, first_sequences(batch)), expected.gradients)


@dataclass(frozen=True)
class Seen:
    """Results of an engine for a model in a layout.

    Reading a result that could not be computed raises :class:`Broken`.

    Attributes:
        config: Configuration of the engine.
        truth: The expected results.
    """

    config: RunConfig
    truth: Truth
    _forward: Forward | Broken
    _gradients: dict[str, Tensor] | Broken

    @property
    def dtype(self) -> str:
        """The run's ``model.dtype``."""
        return str(self.config.model.dtype)

    @property
    def forward(self) -> Forward:
        """Logits of the first sequences; log-probs and entropies of all sequences at two temperatures."""
        if isinstance(self._forward, Broken):
            raise self._forward
        return self._forward

    @property
    def gradients(self) -> dict[str, Tensor]:
        """Gradients of the loss of all sequences, float32, by the weights' names in the model's files."""
        if isinstance(self._gradients, Broken):
            raise self._gradients
        return self._gradients

    @property
    def is_whole(self) -> bool:
        """Whether all results could be computed."""
        return not isinstance(self._forward, Broken) and not isinstance(self._gradients, Broken)


class Built(NamedTuple):
    """A training engine that has been built.

    Attributes:
        config: Configuration of the engine.
        trainer: Ranks of the engine.
    """

    config: RunConfig
    trainer: TrainingWorkers


class Observer:
    """Lets engines compute the values that several rules read, each value once.

    Args:
        subject: The platform.

    Attributes:
        output: A directory for files.
    """

    def __init__(self, subject: Subject) -> None:
        self._format = usual_format(subject)
        self.output = subject.scratch / "model"
        self.output.mkdir(exist_ok=True)
        self._ranks = TrainingRanks(subject.source, self.output)
        self._models: dict[Family, Path] = {}
        self._truths: dict[tuple[Family, str], Truth] = {}
        self._seen: dict[tuple[Family, Layout], Seen] = {}
        self._kept: dict[Hashable, Any] = {}

    @classmethod
    def of(cls, subject: Subject) -> Observer:
        """Return the observer of a subject; there is one for each subject."""
        return subject.keep("observer of models", lambda: cls(subject))

    def see(self, family: Family, layout: Layout) -> Seen:
        """Return the results of the engine of a family in a layout; they are computed at the first call.

        Raises:
            Inapplicable: The plugins refuse the configuration, or there are not enough devices.
        """
        if (family, layout) not in self._seen:
            config = self._configured(family, layout, {}, self.model(family))
            truth = self._truth(family, config.model.dtype)
            self._seen[family, layout] = self._computed(config, truth)
        return self._seen[family, layout]

    def build(
        self,
        family: Family,
        layout: Layout,
        more: Mapping[str, dict[str, Any]] | None = None,
        model: Path | None = None,
    ) -> Built:
        """Build the engine of a family in a layout.

        Args:
            family: The model.
            layout: Layout of its ranks.
            more: Sections of the configuration, merged into the layout's.
            model: Directory of the model; None = the family's tiny model.

        Raises:
            Inapplicable: The plugins refuse the configuration, or there are not enough devices.
            Broken: The engine cannot be built.
        """
        config = self._configured(family, layout, more or {}, model or self.model(family))
        return Built(config, self._ranks.build(config))

    def once(self, what: Hashable, compute: Callable[[], Kept]) -> Kept:
        """Return the value with the key ``what``; the first case that needs it computes it."""
        if what not in self._kept:
            self._kept[what] = compute()
        return cast("Kept", self._kept[what])

    def model(self, family: Family) -> Path:
        """Directory of a family's tiny model."""
        if family not in self._models:
            directory = self.output / f"model-{len(self._models)}"
            self._models[family] = write_tiny_model(family.name, directory, **dict(family.changes))
        return self._models[family]

    def close(self) -> None:
        """End the engines."""
        self._ranks.close()

    def _configured(self, family: Family, layout: Layout, more: Mapping[str, dict[str, Any]], model: Path) -> RunConfig:
        # About three micro-batches, of several sequences each.
        most = recorded_of(family).num_tokens // 3 + 3
        sections: dict[str, dict[str, Any]] = {
            "engine": {"sequence_format": self._format, "max_tokens_per_micro_batch": most}
        }
        for given in (layout.sections, more):
            for name, section in given.items():
                sections[name] = {**sections.get(name, {}), **section}
        return self._ranks.config(model, sections)

    def _computed(self, config: RunConfig, truth: Truth) -> Seen:
        try:
            trainer = self._ranks.build(config)
            with said():
                forward = observe_forward(trainer, config, truth.batch)
        except Broken as broken:
            return Seen(config, truth, broken, broken)
        try:
            with said():
                plan = plan_of(trainer, config)
                return Seen(config, truth, forward, computed_gradients(trainer, plan, truth.batch, self.output)[0])
        except Broken as broken:
            return Seen(config, truth, forward, broken)

    def _truth(self, family: Family, dtype: str) -> Truth:
        if (family, dtype) not in self._truths:
            truth = Truth.of(self.model(family), recorded_of(family), getattr(torch, dtype))
            self._truths[family, dtype] = truth
        return self._truths[family, dtype]


def recorded_of(family: Family) -> RaggedBatch:
    """Return the trajectories with which a family is checked."""
    return recorded_images() if family.takes_images else recorded()


@dataclass(frozen=True)
class Family:
    """A tiny model.

    Attributes:
        name: Key of :data:`anytron_conformance.tiny_models.CONFIGS`.
        title: Name of the model for users.
        needs: Features that the model requires and a platform may lack.
        changes: Fields of the model's config that replace those of the entry.
    """

    name: str
    title: str
    needs: tuple[Feature, ...] = ()
    changes: tuple[tuple[str, Any], ...] = ()

    @property
    def takes_images(self) -> bool:
        """Whether the model's sequences have images."""
        return Feature.VISION in self.needs


@dataclass(frozen=True)
class Layout:
    """One way to arrange a model and its sequences over ranks.

    Attributes:
        name: Name of the layout for users.
        needs: Features that the layout requires and a platform may lack.
        sections: Sections of the configuration; sequences are packed unless a section or the platform says otherwise.
    """

    name: str
    needs: tuple[Feature, ...] = ()
    sections: dict[str, dict[str, Any]] = field(default_factory=dict, hash=False)


def _split(key: str, name: str, feature: Feature, **more: int) -> Layout:
    return Layout(name, (feature,), {"parallel": {f"{key}_parallel_size": 2, **more}})


ONE = Layout("one rank")
PADDED = Layout("one rank, padded", (Feature.THD, Feature.BSHD), {"engine": {"sequence_format": "bshd"}})
HALF = Layout("one rank, bfloat16", (Feature.BFLOAT16,), {"model": {"dtype": "bfloat16"}})
TENSOR = _split("tensor_model", "TP2", Feature.TENSOR_PARALLEL)
PIPELINE = _split("pipeline_model", "PP2", Feature.PIPELINE_PARALLEL)
REPLICAS = Layout("DP2", (), {"parallel": {"data_parallel_size": 2}})
CONTEXT = _split("context", "CP2", Feature.CONTEXT_PARALLEL)
CONTEXT_OF_FOUR = _split("context", "CP4", Feature.CONTEXT_PARALLEL, context_parallel_size=4)
PADDED_CONTEXT = Layout(
    "CP2, padded", (*CONTEXT.needs, Feature.BSHD), {**CONTEXT.sections, "engine": {"sequence_format": "bshd"}}
)
INTERLEAVED = Layout(
    "PP2 x VPP2",
    (*PIPELINE.needs, Feature.INTERLEAVED_PIPELINE),
    {**PIPELINE.sections, "engine": {"options": {"virtual_pipeline_model_parallel_size": 2}}},
)
EXPERT = _split("expert_model", "EP2", Feature.EXPERT_PARALLEL, data_parallel_size=2)
_SHARED = (Feature.EXPERT_PARALLEL, Feature.TENSOR_PARALLEL)
TENSOR_EXPERT = Layout(
    "TP2, EP2", _SHARED, {"parallel": {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2}}
)
SPLIT_EXPERTS = Layout(
    "DP2, TP2, EP2, ETP2",
    _SHARED,
    {"parallel": {**TENSOR_EXPERT.sections["parallel"], "data_parallel_size": 2, "expert_tensor_parallel_size": 2}},
)

_EXPERTS, _LATENT, _LINEAR = Feature.MIXTURE_OF_EXPERTS, Feature.LATENT_ATTENTION, Feature.LINEAR_ATTENTION
QWEN3 = Family("qwen3", "Qwen3")
EVERY_HEAD = Family("qwen3", "Qwen3, one query per key head", changes=(("num_key_value_heads", 4),))
ONE_HEAD = Family("qwen3", "Qwen3, one key head", changes=(("num_key_value_heads", 1),))
QWEN2 = Family("qwen2", "Qwen2, tied")
LLAMA = Family("llama", "Llama")
QWEN3_MOE = Family("qwen3_moe", "Qwen3-MoE", (_EXPERTS,))
DEEPSEEK_V3 = Family("deepseek_v3", "DeepSeek-V3", (_LATENT, _EXPERTS))
DENSE_DEEPSEEK_V3 = Family(
    "deepseek_v3", "DeepSeek-V3, dense layers", DEEPSEEK_V3.needs, changes=(("first_k_dense_replace", 4),)
)
QWEN3_NEXT = Family("qwen3_next", "Qwen3-Next", (_LINEAR, _EXPERTS))
QWEN3_5 = Family("qwen3_5", "Qwen3.5, images", (_LINEAR, Feature.VISION))
QWEN3_VL = Family("qwen3_vl", "Qwen3-VL, images", (Feature.VISION,))
QWEN2_5_VL = Family("qwen2_5_vl", "Qwen2.5-VL, images", QWEN3_VL.needs)

ARRANGED = (QWEN3, QWEN2, QWEN3_MOE, DEEPSEEK_V3, QWEN3_NEXT, QWEN3_5, QWEN3_VL)
"""The families that are computed in every layout, the simplest first, because a rule shows only the first failure."""
FAMILIES = (*ARRANGED, LLAMA, QWEN2_5_VL)
"""All families. The last two are computed on one rank only, because they have no layers that a layout would split in
another way: Llama's layers are Qwen3's without norms of heads, and Qwen2.5-VL's language model is like Qwen2."""
MIXTURES = (QWEN3_MOE, DEEPSEEK_V3, QWEN3_NEXT)


def cases(layout: Layout, *families: Family) -> Iterator[Case]:
    """Make a case for each family in a layout."""
    for place, family in enumerate(families):
        yield Case(f"{family.title}, {layout.name}", (family, layout), place, (*family.needs, *layout.needs))
