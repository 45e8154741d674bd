"""Check that Megatron and mcore-bridge compute a model as Hugging Face does. Imports no Megatron."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from anytron.base.errors import did_you_mean
from anytron.config.diagnostics import Diagnostic
from anytron.task.data.composites import COMPOSITES
from anytron.task.data.model_files import SAME_MODELS
from anytron_megatron.checks.chunked_attention import layer_diagnostics
from anytron_megatron.checks.hybrid import hybrid_diagnostics
from anytron_megatron.checks.sparse_attention import sparse_diagnostics
from anytron_megatron.models.families import FAMILIES, family_of, proved
from anytron_megatron.options import transformer_fields

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from anytron_megatron.checks.subject import Subject
    from anytron_megatron.models.families import Family
    from anytron_megatron.options import MegatronOptions

_BY_TWO = (
    "deepseek_v3", "deepseek_v32", "dots1", "glm4_moe", "glm4_moe_lite", "glm4v_moe", "glm_moe_dsa", "nemotron_h",
)  # fmt: skip
_RATED_BY = {"deepseek_v2": 1, **dict.fromkeys(_BY_TWO, 2)}
"""Number of a group's best experts by which a family rates the group (DeepSeek-V2: https://arxiv.org/abs/2405.04434,
section 2.2.2; DeepSeek-V3: https://arxiv.org/abs/2412.19437, section 2.1.2, K_r / M = 8 / 4)."""

_NO_GROUPS = {"n_group": 1, "topk_group": 1}
_GROUPS = {family: {"n_group": 8, "topk_group": 4} for family in ("deepseek_v3", "deepseek_v32")}
"""What transformers takes where a config does not say how many groups of experts there are, and how many are chosen."""

_SIGMOID = (
    "deepseek_v3", "deepseek_v32", "dots1", "glm4_moe", "glm4_moe_lite", "glm4v_moe", "glm_moe_dsa", "hy_v3",
    "minimax_m2", "nemotron_h",
)  # fmt: skip
"""Families whose routers score by sigmoid, in Megatron and in transformers."""

_ANOTHER = "train a model of another family; docs/reference/families.md lists the families"

_ROPE_TYPES = {"default", "mrope", "linear", "llama3", "yarn"}
"""Kinds of rotary embedding that tests compare with Hugging Face's."""

_OWN_ROPE_TYPES = {"gemma4": {"proportional"}, "gemma4_unified": {"proportional"}}
"""Further kinds that a test compares for some families."""

_FEWER_ROPE_TYPES = {"llama4": {"default", "llama3"}}
"""All kinds for one family: Llama 4 normalises rotated queries, where Megatron rotates normalised ones. Both are equal,
unless a rotation changes lengths, as yarn's does."""

_REFUSED: Mapping[str, tuple[str, str]] = {
    "mtp_detach_heads": (
        (
            "with this option Megatron leaves the prediction modules out of the gradient norm, by which this engine "
            "finds and skips updates that are not finite"
        ),
        "remove this option, and set engine.options.mtp_detach=true",
    ),
    "mtp_use_repeated_layer": (
        "Anytron computes prediction modules in its own loop, in which each depth has its own layer",
        "remove this option",
    ),
    **dict.fromkeys(
        ("gtp_weight_remat_size", "expert_gtp_weight_remat_size"),
        ("Megatron would split weights over ranks that this configuration does not describe", "remove this option"),
    ),
}
"""Fields that Megatron's transformer config has since 0.17 or later and that this engine refuses: the reason, and the
fix."""


def transformer_diagnostics(policy: Subject, options: MegatronOptions) -> Iterator[Diagnostic]:
    """Check the names in ``engine.options.transformer``."""
    if not options.transformer:
        return
    known = transformer_fields(latent_attention=bool(policy.text.get("kv_lora_rank")))
    for name in options.transformer:
        if name in _REFUSED:
            yield Diagnostic("error", f"engine.options.transformer.{name}", *_REFUSED[name])
        elif name not in known:
            yield Diagnostic(
                "error",
                f"engine.options.transformer.{name}",
                "Megatron's transformer config has no field of that name",
                did_you_mean(name, known) or "remove it",
            )


def model_diagnostics(subject: Subject, options: MegatronOptions) -> Iterator[Diagnostic]:
    """Check from its config whether a model can be trained: its family, experts and rotary embeddings."""
    if not subject.config:
        return
    key, family = subject.key, str(subject.config.get("model_type"))
    row = family_of(subject.config)
    if row is None:
        near = did_you_mean(family, FAMILIES)
        field = f"correct model_type in the model's config.json ({near}), or {_ANOTHER}" if near else _ANOTHER
        yield Diagnostic(
            "error",
            key if subject.path is not None else f"{key}.model_type",
            f"the engine does not support the model type {family}",
            field if subject.path is not None else near or f"use one of {', '.join(sorted(FAMILIES))}",
        )
        return
    if family in COMPOSITES:
        yield _unread(subject, family)
        return
    if obstacle := _obstacle(row, subject.text):
        yield Diagnostic("error", key, f"{family} cannot be trained: {obstacle[0]}", obstacle[1])
        return
    yield from sparse_diagnostics(key, row, subject.text, options)
    yield from hybrid_diagnostics(key, row, subject.text)
    inner = str(subject.text.get("model_type", "of no model_type")) if row.language_models else family
    if row.language_models and inner not in row.language_models:
        yield Diagnostic(
            "error",
            key,
            f"the language model (text_config) of this {family} is {inner}, and no test compares it with Hugging Face "
            f"(tested: {', '.join(row.language_models)})",
            _ANOTHER,
        )
    elif not row.proof:
        yield Diagnostic(
            "warning",
            key,
            f"mcore-bridge builds {family}, but no test of Anytron compares it with Hugging Face",
            "compare it with anytron verify before you train",
        )
    if inner in FAMILIES:
        yield from _routing(key, inner, subject.text, options)
    yield from _orientation(key, family, subject.text)
    if family == "gemma4" and not subject.config.get("vision_config"):
        # mcore_bridge/model/mm_gpts/gemma4.py, prepare_model
        message = "this gemma4 has no vision_config, and mcore-bridge builds none without a tower of images"
        yield Diagnostic("error", key, message, "train a model with a vision_config, as all published ones have")
    yield from _ernie(key, family, subject.text, options)
    yield from layer_diagnostics(key, family, subject.text)
    yield from _rotary(key, row, subject.text)


def _unread(subject: Subject, family: str) -> Diagnostic:
    """Refuse a model of which Anytron could read only the language model, and did not."""
    composite = COMPOSITES[family]
    why = (
        f"mcore-bridge builds {family} with Python files of the model directory, but Anytron runs no code of a model "
        f"directory (SECURITY.md): it reads the language model ({composite.field}) alone"
    )
    if subject.path is None:
        fix = f"set model.path to its directory, or model.config to the fields of its {composite.field}"
        return Diagnostic("error", subject.key, why, fix)
    text = subject.config.get(composite.field)
    found = text.get("model_type") if isinstance(text, dict) else None
    tested = ", ".join(composite.types)
    return Diagnostic("error", subject.key, f"{why}, and this one is {found}, not one of {tested}", _ANOTHER)


def _obstacle(row: Family, text: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return why this model cannot be built, and what to do; None if no reason is known."""
    if row.obstacle:
        return row.obstacle, _ANOTHER
    if row.model_type in SAME_MODELS:  # in model.config; Anytron replaces it where it reads a directory
        known = SAME_MODELS[row.model_type]
        return "transformers has no such model type", (
            f"set model.config.model_type={known}: it is the same model, with the same tensors"
        )
    if missing := [name for name in row.wanted if text.get(name) is None]:
        names = ", ".join(missing)
        return f"mcore-bridge needs {names}, which the model's config lacks", f"add {names} to the model's config"
    if row.needs is not None and find_spec(row.needs[0]) is None:
        return f"mcore-bridge needs the package {row.needs[1]}, which is missing", f"pip install {row.needs[1]}"
    if row.proof:
        return None  # transformers has its class, and takes a second to be asked
    import transformers

    if row.model_type in transformers.CONFIG_MAPPING:
        return None
    known = f"transformers {transformers.__version__} has no such model type"
    return f"{known}, and Anytron runs no code of a model directory (SECURITY.md)", _ANOTHER


def prediction_diagnostics(policy: Subject, options: MegatronOptions) -> Iterator[Diagnostic]:
    """Check that the model's multi-token prediction modules can be trained, if the run trains them."""
    family = family_of(policy.config)
    if options.mtp_loss_coefficient == 0.0 or family is None:
        return
    key = "engine.options.mtp_loss_coefficient"
    if "MTP" not in family.proof:
        message = (
            f"multi-token prediction of {family.model_type} is not supported: no test compares it with its definition"
        )
        yield Diagnostic("error", key, message, f"set {key}=0 (tested types: {proved('MTP')})")
    elif not policy.text.get("num_nextn_predict_layers"):
        yield Diagnostic("error", key, "the model has no multi-token prediction modules", f"set {key}=0")
    elif policy.path is None:
        yield Diagnostic(
            "error",
            key,
            (
                "a model that starts from random weights has no multi-token prediction modules: transformers does "
                "not make them"
            ),
            f"set {key}=0, or set model.path to a directory with weights",
        )


def _routing(key: str, family: str, text: Mapping[str, Any], options: MegatronOptions) -> Iterator[Diagnostic]:
    """Check that Megatron routes as the family's code in transformers does."""
    if family in _GROUPS and text.get("n_routed_experts", 1):
        yield from _described_routing(key, family, text, options)
    count, groups = (text.get(name, default) or 1 for name, default in _GROUPS.get(family, _NO_GROUPS).items())
    chosen = text.get("num_experts_per_tok") or 8
    normalised = text.get("norm_topk_prob", family != "dots1")
    # megatron/core/transformer/moe/moe_utils.py, group_limited_topk; the routers in transformers
    rated_by = _RATED_BY.get(family)
    if rated_by is not None and count > 1 and chosen // groups != rated_by:
        yield Diagnostic(
            "error",
            key,
            f"Megatron scores a group of experts by its {chosen // groups} best experts (num_experts_per_tok // "
            f"topk_group), but {FAMILIES[family].title} by its {rated_by} best: Megatron would choose other experts",
            f"train a model with num_experts_per_tok = {rated_by} * topk_group, or with one group",
        )
    if family in _SIGMOID and (chosen == 1 or not normalised):
        yield Diagnostic(
            "error",
            key,
            f"num_experts_per_tok is {chosen} and norm_topk_prob is {normalised}, but Megatron ignores "
            "norm_topk_prob: with sigmoid routing it scales the weights of several chosen experts to a sum of 1, and "
            "never the weight of a single one",
            "train a model with norm_topk_prob=true and several experts per token",
        )


def _orientation(key: str, family: str, text: Mapping[str, Any]) -> Iterator[Diagnostic]:
    """Check that shapes say which way round a file has the weights of experts, which transformers finds out by them."""
    hidden, size = text.get("hidden_size"), text.get("moe_intermediate_size")
    if family == "qwen3_vl_moe" and hidden and size and hidden in (size, 2 * size):
        yield Diagnostic(
            "error",
            key,
            f"hidden_size is {hidden} and moe_intermediate_size {size}: a weight of the experts is square, so that its "
            "shape does not say whether a file has it as published or, as transformers 5 writes it, transposed",
            "train a model whose hidden_size is neither moe_intermediate_size nor twice as large",
        )


def _ernie(key: str, family: str, text: Mapping[str, Any], options: MegatronOptions) -> Iterator[Diagnostic]:
    """Check that Megatron has the experts of an ERNIE-4.5 in its layers, and chooses them with their bias."""
    if family != "ernie4_5_moe":
        return
    defaults = {"moe_layer_end_index": -1, "moe_layer_interval": 1, "num_hidden_layers": 28}
    last, interval, layers = (default if text.get(name) is None else text[name] for name, default in defaults.items())
    if interval != 1 or (last != -1 and last < layers - 1):
        yield Diagnostic(
            "error",
            key,
            f"moe_layer_interval is {interval} and moe_layer_end_index {last}, but mcore-bridge builds experts in all "
            "layers from moe_layer_start_index on",
            "train a model that has experts in all these layers, as the published ones do",
        )
    for name in ("moe_router_fusion", "moe_router_pre_softmax"):
        if options.transformer.get(name):
            yield Diagnostic(
                "error",
                f"engine.options.transformer.{name}",
                "with this option Megatron ignores the bias with which ERNIE-4.5 chooses experts",
                "remove this option",
            )
    name = "moe_router_enable_expert_bias"
    if name in options.transformer:
        message = "ERNIE-4.5 chooses experts with a bias, and Anytron sets this option itself"
        yield Diagnostic("error", f"engine.options.transformer.{name}", message, "remove this option")


def _described_routing(
    key: str, family: str, text: Mapping[str, Any], options: MegatronOptions
) -> Iterator[Diagnostic]:
    """Check that DeepSeek-V3's config describes its routing: Megatron reads it there, transformers has it built in."""
    title, option = FAMILIES[family].title, "engine.options.transformer.moe_router_score_function"
    given, scoring = options.transformer.get("moe_router_score_function"), text.get("scoring_func")
    if given not in (None, "sigmoid"):
        message = f"this option is {given}, but {title} routes by sigmoid"
        yield Diagnostic("error", option, message, f"set {option}=sigmoid")
    elif given is None and scoring != "sigmoid":
        found = "lacks scoring_func" if scoring is None else f"says scoring_func {scoring}"
        yield Diagnostic(
            "error",
            key,
            f"the model's config {found}: Megatron would route by softmax, and {title} routes by sigmoid",
            'write "scoring_func": "sigmoid" and "topk_method": "noaux_tc" into the model\'s config, as the published '
            "config.json has them",
        )
    if text.get("topk_method", "noaux_tc") != "noaux_tc":
        yield Diagnostic(
            "error",
            key,
            f"the model's config says topk_method {text['topk_method']}, which Megatron does not read: it would choose "
            "experts as noaux_tc does",
            'set "topk_method": "noaux_tc" in the config if the model routes so, as the published ones do',
        )


def _rotary(key: str, family: Family, text: Mapping[str, Any]) -> Iterator[Diagnostic]:
    parameters = text.get("rope_parameters") or text.get("rope_scaling") or {}
    by_layer = [one for one in parameters.values() if isinstance(one, dict)]  # Gemma 4: one for each type of layer
    kinds = {str(one.get("rope_type", one.get("type", "default"))) for one in by_layer or [parameters]}
    part = parameters.get("partial_rotary_factor", text.get("partial_rotary_factor", 1.0))
    if family.rotates_whole_heads and part != 1.0:
        yield Diagnostic(
            "error",
            key,
            f"partial_rotary_factor is {part}: Megatron would rotate only this part of each head, but transformers "
            f"ignores the setting for {family.model_type} and rotates whole heads",
            "remove partial_rotary_factor from the model's config",
        )
    varying = sorted(kinds & {"dynamic", "longrope"})
    if varying:
        yield Diagnostic(
            "error",
            key,
            f"rotary embeddings of type {varying[0]} depend on the longest sequence of a batch, so the rollout and "
            "training compute different log-probs for the same tokens",
            "set the rope_type of rope_parameters in the model's config to a fixed one, for example yarn",
        )
    known = _FEWER_ROPE_TYPES.get(family.model_type, _ROPE_TYPES | _OWN_ROPE_TYPES.get(family.model_type, set()))
    if not varying and (untested := sorted(kinds - known)):
        yield Diagnostic(
            "error",
            key,
            f"rotary embeddings of type {untested[0]} are not supported: no test compares them with Hugging Face's",
            f"train a model with one of the tested types: {', '.join(sorted(known))}",
        )
