"""Fixes of imports, and of code that expects CUDA, CUDA's generator, torch.compile or Transformer Engine."""

from __future__ import annotations

import importlib
import logging
import sys
import warnings
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

from anytron.base.errors import EngineError
from anytron.device.patches import Installed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from anytron.device.hooks.types import PatchContext


# Modules that mcore_bridge/patcher.py and tuners/patcher.py import and patch. We import them first, so that
# their own definitions do not count as changes.
PATCHED_MODULES = (
    "megatron.core.extensions.transformer_engine",
    "megatron.core.models.common.embeddings.rope_utils",
    "megatron.core.models.common.embeddings.rotary_pos_embedding",
    "megatron.core.transformer.moe.router",
    "megatron.core.transformer.multi_token_prediction",
    "peft.tuners.lora.model",
    "peft.tuners.tuners_utils",
    "peft.utils.other",
    "transformers.modeling_rope_utils",
    "transformer_engine.pytorch.attention",
)
WATCHED_PACKAGES = ("megatron.", "peft.", "transformers.", "transformer_engine.")
_ABSENT = object()


@dataclass(frozen=True)
class Change:
    """An attribute that importing mcore-bridge has replaced or added."""

    owner: Any
    name: str
    before: Any

    def __str__(self) -> str:
        if isinstance(self.owner, ModuleType):
            return f"{self.owner.__name__}:{self.name}"
        return f"{self.owner.__module__}:{self.owner.__qualname__}.{self.name}"

    def undo(self) -> None:
        """Give the attribute its previous value, or delete it if it is new."""
        if self.before is _ABSENT:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.before)


def import_bridge(_context: PatchContext) -> Installed:
    """Import ``mcore_bridge`` and its models. Undoing restores what they patched; the modules stay imported."""
    imported_earlier = "mcore_bridge" in sys.modules
    for name in PATCHED_MODULES:
        _import_patched(name)
    before = {id(owner): (owner, dict(vars(owner))) for owner in _watched()}
    with _logging_kept():
        importlib.import_module("mcore_bridge")
        importlib.import_module("mcore_bridge.model")
    changes = [change for owner, attributes in before.values() for change in _compare(owner, attributes)]

    def undo() -> None:
        for change in reversed(changes):
            change.undo()

    if imported_earlier:
        return Installed(undo, "mcore-bridge was imported earlier in this process, so its changes are not known")
    return Installed(undo, "changed " + ", ".join(sorted(map(str, changes))))


def _import_patched(name: str) -> None:
    """Import a module. A module of Transformer Engine may be missing: the portable package has only some of them."""
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("transformer_engine"):
            raise


@contextmanager
def _logging_kept() -> Iterator[None]:
    """Import quietly, and keep this process's own log.

    mcore_bridge/utils/logger.py sets the root logger's stream handlers to ERROR, which would silence all
    loggers, and reports its environment variables at level INFO on a handler of its own.
    """
    levels = [(handler, handler.level) for handler in logging.getLogger().handlers]
    disabled = logging.root.manager.disable
    logging.disable(logging.INFO)
    try:
        yield
    finally:
        logging.disable(disabled)
        for handler, level in levels:
            handler.setLevel(level)


def _watched() -> Iterator[Any]:
    """Yield the loaded modules of the watched packages and the classes that they define."""
    for name, module in list(sys.modules.items()):
        if name.startswith(WATCHED_PACKAGES) and isinstance(module, ModuleType):
            yield module
            for value in list(vars(module).values()):
                if isinstance(value, type) and value.__module__ == module.__name__:
                    yield value


def _compare(owner: Any, before: dict[str, Any]) -> Iterator[Change]:
    for name, value in list(vars(owner).items()):
        old = before.get(name, _ABSENT)
        # Newly imported submodules and the bookkeeping of classes (ABC caches) are not patches.
        if old is value or isinstance(value, ModuleType) or name.startswith("_abc_"):
            continue
        # transformers' lazy modules gain attributes when someone reads them.
        filled_in = old is _ABSENT and isinstance(owner, ModuleType) and type(owner) is not ModuleType
        if callable(value) and not filled_in:
            yield Change(owner, name, old)


# Regular expressions of how messages begin, and where megatron-core emits them: 0.16.1 unless another is named.
WARNINGS: tuple[tuple[str, type[Warning]], ...] = (
    # inference/contexts/__init__.py:9
    (r"The following imports from `dynamic_context\.py` will be removed", DeprecationWarning),
    # transformer/custom_layers/transformer_engine.py, imported by transformer/multi_latent_attention.py:36
    (r"The 'megatron\.core\.transformer\.custom_layers\.transformer_engine'", DeprecationWarning),
    # models/backends.py:21, models/gpt/gpt_layer_specs.py:70
    (r"Apex is not installed\. Falling back to Torch Norm", UserWarning),
    # optimizer/clip_grads.py:29
    (r"Transformer Engine and Apex are not installed\.", UserWarning),
    # 0.17.1 and later: hyper_comm_grid.py:20
    (r"absl\.logging is not installed\.", UserWarning),
)
# Loggers that report their configuration at level INFO, on every rank.
TALKATIVE_LOGGERS = ("megatron.core.distributed.fsdp", "megatron.core.num_microbatches_calculator")


def filter_messages(_context: PatchContext) -> Installed:
    """Filter known warnings that Megatron emits when it is imported, and messages below WARNING of verbose loggers."""
    filters_before = list(warnings.filters)
    for message, category in WARNINGS:
        warnings.filterwarnings("ignore", message=r"\s*" + message, category=category)
    added = [entry for entry in warnings.filters if entry not in filters_before]
    levels = {name: logging.getLogger(name).level for name in TALKATIVE_LOGGERS}
    for name in TALKATIVE_LOGGERS:
        logging.getLogger(name).setLevel(logging.WARNING)

    def undo() -> None:
        # The end of a warnings.catch_warnings() block may have removed them already.
        for entry in added:
            if entry in warnings.filters:
                warnings.filters.remove(entry)  # type: ignore[attr-defined]
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)

    return Installed(undo)


def refuse_model_code(original: Callable[..., str]) -> Callable[..., NoReturn]:
    """Replace the function that copies a model directory's Python files for import: raise an error instead.

    All code of transformers gets such files through this function.
    """
    del original

    def get_cached_module_file(directory: Any, module_file: str, *_: Any, **__: Any) -> NoReturn:
        raise EngineError(
            "A model directory wants to run its own code.",
            where=f"{directory}, {module_file}",
            why="Anytron never runs code from a model directory (SECURITY.md)",
            fix="use a model whose code is in transformers",
        )

    return get_cached_module_file


def deny_transformer_engine(_original: Callable[[], bool]) -> Callable[[], bool]:
    """Replace peft's probe for Transformer Engine, whose name the portable modules take: return False.

    peft only asks whether the name can be imported. If it asks after the portable modules have taken the name, it
    treats their layers as quantised ones, which cannot be merged; if it asks before, it does not. accelerate and
    transformers look for the distribution, which is absent.
    """
    return lambda: False


def redirect_to_platform(context: PatchContext) -> Installed:
    """Redirect ``torch.cuda`` to the platform's runtime."""
    from anytron_megatron.redirect import redirect_torch_cuda

    return Installed(redirect_torch_cuda(context.platform.runtime()))


def leave_uncompiled(_original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace ``torch.compile``: return the function itself or, without one, a decorator that does so."""

    def compile(model: Callable[..., Any] | None = None, **_options: Any) -> Callable[..., Any]:  # noqa: A001
        return (lambda function: function) if model is None else model

    return compile


def alias_portable_modules(context: PatchContext) -> Installed:
    """Put the portable modules under the name ``transformer_engine``, with the platform's kernels."""
    # They may import what patches before this one prepare.
    from anytron_megatron.portable_te.alias import install

    return Installed(install(context.kernels, context.platform.runtime().device_type))


_TRACKER_LOGGER = "megatron.core.tensor_parallel.random"
_TRACKER_WARNING = "CPU RNG state changed within GPU RNG context"


def drop_warning(context: PatchContext) -> Installed:
    """Drop one warning of Megatron's RNG tracker if the device draws from the host's generator.

    The tracker warns if the host's random state changed while the device's generator was forked. If both use one
    generator, each draw in the fork changes it, and the fork restores it at its end: the warning is a false alarm.
    """
    import torch

    if context.platform.runtime().default_generator() is not torch.default_generator:
        return Installed(lambda: None, "not needed: the device is not known to draw from the host's generator")
    logger = logging.getLogger(_TRACKER_LOGGER)

    def keep(record: logging.LogRecord) -> bool:
        return record.msg != _TRACKER_WARNING

    logger.addFilter(keep)
    return Installed(lambda: logger.removeFilter(keep))
