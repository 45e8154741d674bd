"""Check that the policy can generate on its training ranks (``rollout.engine=megatron``). Imports no Megatron."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anytron.config.diagnostics import Diagnostic
from anytron_megatron.models.families import family_of, proved
from anytron_megatron.options import ENGINE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from anytron.config.schema import RunConfig
    from anytron.device.platform import Platform
    from anytron_megatron.checks.subject import Subject
    from anytron_megatron.options import MegatronOptions

_KEY = "rollout.engine"
_FIX = "set rollout.engine=transformers"


def generation_diagnostics(policy: Subject, run: RunConfig, options: MegatronOptions) -> Iterator[Diagnostic]:
    """Report settings and models with which Megatron's key-value cache would be missing or wrong."""
    if run.rollout.engine != ENGINE:
        return
    family = family_of(policy.config)
    if family is not None and "cache" not in family.proof:
        why = family.cacheless or "no test compares tokens that they generate with their forward pass"
        message = f"models of type {family.model_type} cannot generate on the training ranks: {why}"
        yield Diagnostic("error", _KEY, message, f"{_FIX} (tested types: {proved('cache')})")
    if policy.text.get("use_sliding_window") or "sliding_attention" in (policy.text.get("layer_types") or ()):
        message = (
            "layers with a sliding window cannot generate on the training ranks: no test compares their cache with "
            "their forward pass"
        )
        yield Diagnostic("error", _KEY, message, _FIX)
    if policy.text.get("kv_lora_rank") and run.parallel.tensor_model_parallel_size > 1:
        # mcore_bridge/model/modules/multi_latent_attention.py, line 82
        yield Diagnostic(
            "error",
            "parallel.tensor_model_parallel_size",
            "generation with multi-latent attention needs one tensor-parallel rank: mcore-bridge gathers keys over "
            "these ranks as if the sequence were split, but a step of generation has one token",
            f"set parallel.tensor_model_parallel_size=1, or {_FIX}",
        )
    if run.parallel.context_parallel_size > 1:
        yield Diagnostic(
            "error",
            "parallel.context_parallel_size",
            "Megatron's cache of keys and values holds whole sequences, but context parallelism splits them",
            f"set parallel.context_parallel_size=1, or {_FIX}",
        )
    for name in ("fp8", "fp4"):
        if options.transformer.get(name):
            yield Diagnostic(
                "error",
                f"engine.options.transformer.{name}",
                (
                    f"{name.upper()} kernels take whole blocks of tokens, but a step of generation has one token of "
                    "each sequence"
                ),
                f"set engine.options.transformer.{name}=null, or {_FIX}",
            )


def platform_diagnostics(run: RunConfig, platform: Platform) -> Iterator[Diagnostic]:
    """Refuse attention modules that generation has not been tested with."""
    del run
    if not platform.portable_modules:
        yield Diagnostic(
            "error",
            _KEY,
            f"generation on training ranks is tested with the portable attention modules only, but platform "
            f"{platform.name} uses its vendor's attention modules",
            _FIX,
        )
