"""Check that rollout and training can be equal to the bit (``engine.on_policy=bitwise``). Imports no Megatron."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anytron.config.diagnostics import Diagnostic
from anytron_megatron.models.families import family_of, proved

if TYPE_CHECKING:
    from collections.abc import Iterator

    from anytron.config.schema import RunConfig
    from anytron.device.platform import Platform
    from anytron_megatron.checks.subject import Subject
    from anytron_megatron.options import MegatronOptions

KEY = "engine.on_policy"
_CLOSE = "set engine.on_policy=close"
_DROPOUT = ("attention_dropout", "hidden_dropout")


def bitwise_diagnostics(policy: Subject, run: RunConfig, options: MegatronOptions) -> Iterator[Diagnostic]:
    """Refuse models and layouts in which a token's log-prob is computed in two ways, or that no test has compared."""
    if run.engine.on_policy != "bitwise":
        return
    yield from (Diagnostic("error", KEY, why, f"{fix}, or {_CLOSE}") for why, fix in _obstacles(policy, run, options))


def _obstacles(policy: Subject, run: RunConfig, options: MegatronOptions) -> Iterator[tuple[str, str]]:
    family, sizes = family_of(policy.config), run.parallel.sizes()
    if family is not None and "cache" not in family.proof:
        why = f"no test has compared the bits of a {family.model_type} in training and in decoding; linear attention, "
        why += "for example, is computed in chunks when it is trained and token by token when it decodes"
        yield why, f"train a model of another family ({proved('cache')})"
    activation = policy.text.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        yield f"no test has compared the bits of the activation {activation}", "train a model whose hidden_act is silu"
    if run.model.lora is not None:
        yield "adapters have layers whose bits no test has compared", "remove model.lora"
    if sizes.context > 1:
        yield "no test has compared the bits of context-parallel ranks", "set parallel.context_parallel_size=1"
    for name in _DROPOUT:
        if options.transformer.get(name):
            yield "dropout changes log-probs in training only", f"remove engine.options.transformer.{name}"


def bitwise_platform_diagnostics(run: RunConfig, platform: Platform) -> Iterator[Diagnostic]:
    """Refuse a vendor's modules, whose products no kernel of a platform replaces."""
    if run.engine.on_policy == "bitwise" and not platform.portable_modules:
        message = (
            f"platform {platform.name} uses its vendor's modules, which choose how to add up a product by its shape"
        )
        yield Diagnostic("error", KEY, message, f"select Anytron's portable modules in platform.options, or {_CLOSE}")
