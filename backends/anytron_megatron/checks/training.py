"""Check optimizer, reduction of gradients, number format and deterministic mode of a run. Imports no Megatron."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from anytron.config.diagnostics import Diagnostic
from anytron.device.platform import decisions_of
from anytron_megatron.checks.on_policy import bitwise_platform_diagnostics
from anytron_megatron.models.families import has_idle_tower
from anytron_megatron.options import MegatronOptions

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from anytron.config.schema import RunConfig
    from anytron.device.platform import Platform
    from anytron_megatron.checks.subject import Subject


NO_NONDETERMINISTIC_ALGORITHM = {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
"""The environment variable that Megatron's deterministic mode requires, also with portable modules
(TEDotProductAttention in megatron/core/extensions/transformer_engine.py)."""

_OVERLAP = "engine.options.overlap_grad_reduce"

_SEES = frozenset({"vision_tower", "aligner"})


def deterministic_diagnostics(run: RunConfig) -> Iterator[Diagnostic]:
    """Refuse a deterministic run if an environment variable contradicts :data:`NO_NONDETERMINISTIC_ALGORITHM`."""
    for name, value in NO_NONDETERMINISTIC_ALGORITHM.items() if run.engine.deterministic else ():
        if os.environ.get(name, value) != value:
            message = f"Megatron refuses a deterministic run with {name}={os.environ[name]}"
            yield Diagnostic("error", "engine.deterministic", message, f"unset {name}, or set it to {value}")


def optimizer_diagnostics(run: RunConfig) -> Iterator[Diagnostic]:
    """Check that Megatron's distributed optimizer, if the run uses it, supports the optimizers of policy and critic."""
    names = {"optimizer.name": run.optimizer.name}
    if run.critic is not None:
        names["critic.optimizer.name"] = run.critic.optimizer.name
    for key, name in names.items():
        if name != "adam" and run.engine.distributed_optimizer:
            # megatron/core/optimizer/distrib_optimizer.py: "Only Adam and HybridDeviceOptimizer currently supported".
            yield Diagnostic(
                "error",
                "engine.distributed_optimizer",
                f"Megatron's distributed optimizer supports Adam only, and {key} is {name}",
                f"set engine.distributed_optimizer=false, or {key}=adam",
            )


def reduction_diagnostics(policy: Subject, run: RunConfig, options: MegatronOptions) -> Iterator[Diagnostic]:
    """Check that each micro-batch has gradients for all parameters, because overlapped reduction waits for them."""
    if options.ddp_bucket_size is not None and not options.overlap_grad_reduce:
        key, message = "engine.options.ddp_bucket_size", f"this option has no effect without {_OVERLAP}=true"
        yield Diagnostic("error", key, message, f"set {_OVERLAP}=true, or remove {key}")
    idle = frozenset() if has_idle_tower(policy.config) else _SEES - set(run.model.freeze)
    if options.overlap_grad_reduce and policy.config.get("vision_config") and idle:
        other = "" if run.model.lora is not None else f", or add {' and '.join(sorted(idle))} to model.freeze"
        # megatron/core/distributed/param_and_grad_buffer.py, finish_grad_sync: an assertion, where there are no images.
        yield Diagnostic(
            "error",
            _OVERLAP,
            f"micro-batches without images have no gradients for {' and '.join(sorted(idle))}, but overlapped "
            "reduction waits for these gradients",
            f"remove {_OVERLAP}" + other,
        )


def precision_diagnostics(run: RunConfig, platform: Platform) -> Iterator[Diagnostic]:
    """Check FP8, FP4 and batch invariance against the platform's modules.

    Whether the device supports the formats is checked later, in training ranks: the driver may have no device.
    """
    yield from bitwise_platform_diagnostics(run, platform)
    transformer = MegatronOptions.of(run).transformer
    if transformer.get("batch_invariant_mode"):
        yield Diagnostic(
            "error",
            "engine.options.transformer.batch_invariant_mode",
            "this field replaces no kernel: Megatron-LM's scripts also replace torch's operators, and Anytron does not",
            "set engine.on_policy=bitwise in its place",
        )
    if not platform.portable_modules:
        yield from _delayed_scaling(run, transformer)
        return
    for name in ("fp8", "fp4"):
        if transformer.get(name):
            # Why they are portable, where the platform had a choice: to change that is the other way out.
            reasons = [f" ({one.reason})" for one in decisions_of(platform) if one.name == "modules"]
            yield Diagnostic(
                "error",
                f"engine.options.transformer.{name}",
                f"platform {platform.name} uses Anytron's portable Transformer Engine{''.join(reasons)}, which "
                "supports neither FP8 nor FP4",
                f"set engine.options.transformer.{name}=null, and train in bfloat16 or float32",
            )


def _delayed_scaling(run: RunConfig, transformer: Mapping[str, Any]) -> Iterator[Diagnostic]:
    """Warn that checkpoints lack the FP8 scales: layers of Transformer Engine save and load them as pickles only."""
    delayed = transformer.get("fp8") and transformer.get("fp8_recipe", "delayed") == "delayed"
    if delayed and (run.checkpoint.keep > 0 or run.resume != "never"):
        yield Diagnostic(
            "warning",
            "engine.options.transformer.fp8_recipe",
            "a resumed run does not continue bit for bit: checkpoints do not hold the FP8 scales of delayed scaling",
            "use the recipe tensorwise, blockwise or mxfp8, which keep no history",
        )
