"""MindSpeed-LLM's process-wide state: arguments, the patches for them, and what forward passes leave behind."""

from __future__ import annotations

import contextlib
import importlib
import sys
from typing import TYPE_CHECKING, Any

from anytron import EngineError, Installed
from anytron_ascend.mindspeed.process_state import bare_command_line
from anytron_ascend.mindspeed_llm.arguments import SPEC, check_names
from anytron_ascend.mindspeed_llm.installation import find_installation

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterator, Mapping

    from anytron import Ledger, PatchContext
    from anytron.sequences import SequenceLayout
    from anytron.sequences.scopes import ScopeFactory

_installed: list[dict[str, Any]] = []
"""The translated arguments of each engine that is alive in this process; all are equal."""
_patched_for: list[dict[str, Any]] = []
"""The arguments for which MindSpeed-LLM's patches are in place, as the only entry; empty if there are no patches."""


def import_mindspeed_llm(context: PatchContext) -> Installed:
    """Import MindSpeed-LLM, which patches torch and Megatron for its defaults."""
    # Before the import, because MindSpeed replaces importlib.metadata.version.
    found = find_installation()
    context.platform.runtime()
    with bare_command_line():
        from mindspeed_llm import megatron_adaptor
    return Installed(
        megatron_adaptor.MindSpeedFeaturesManager.remove_patches,
        f"MindSpeed-LLM {found.mindspeed_llm}, MindSpeed {found.mindspeed}, megatron-core {found.megatron}",
    )


def install_arguments(arguments: Mapping[str, Any], ledger: Ledger) -> Namespace:
    """Install ``arguments`` in this process, and let MindSpeed-LLM apply its patches for them.

    No state of an earlier engine remains: neither its arguments, nor the layer specification that was made
    from them when its module was imported, nor its mask and sequence lengths.

    ``arguments`` are those of :func:`anytron_ascend.mindspeed_llm.arguments.translate`; the ledger's patches are
    applied again on top of new ones of MindSpeed-LLM. Returns all arguments, validated by Megatron and
    MindSpeed-LLM, as ``megatron.training.get_args`` gives them.

    Raises:
        EngineError: Another engine with other arguments is alive in this process, or MindSpeed-LLM refuses
            or changes the arguments.
        ConfigError: MindSpeed-LLM has no argument of one of the names.
    """
    wanted = dict(arguments)
    if _installed and _installed[0] != wanted:
        before = _installed[0]
        differing = sorted(name for name in wanted.keys() | before.keys() if wanted.get(name) != before.get(name))
        raise EngineError(
            "Two engines with different arguments are in one process.",
            where="engine mindspeed_llm",
            why=f"MindSpeed-LLM has one set of arguments per process, and these differ: {', '.join(differing)}",
            fix="close the first engine, or build the second one in another process",
        )
    full = _validated(wanted)
    if _patched_for != [wanted]:
        from mindspeed_llm.tasks.megatron_adaptor_v2 import repatch

        _patched_for.clear()  # if it fails half-way, no complete set of patches is in place
        with bare_command_line():
            repatch(dict(vars(full)))
        _patched_for.append(wanted)
        ledger.revalidate()
    from megatron.training.global_vars import set_args

    set_args(full)
    _forget_engine()
    _installed.append(wanted)
    return full


def uninstall_arguments() -> None:
    """Delete the arguments of a closed engine; when no engine is left, the next one may have other arguments."""
    _installed.pop()


def layer_specification() -> Any:
    """Return MindSpeed-LLM's specification of a layer for the installed arguments.

    The specification's module reads the arguments when it is imported, so it is imported again.
    """
    module, name = SPEC
    sys.modules.pop(module, None)
    return getattr(importlib.import_module(module), name)


def scope_of(layout: SequenceLayout) -> ScopeFactory:
    """Make scopes within which MindSpeed-LLM's attention reads the ends of the layout's packed sequences.

    MindSpeed-LLM keeps the ends in a list, in addition to MindSpeed's globals
    (:mod:`anytron_ascend.mindspeed.process_state`); without a scope, a recomputation would read the ends of the last
    forward pass.
    """
    ends = layout.cu_seqlens_padded[1:].tolist()

    @contextlib.contextmanager
    def scope() -> Iterator[None]:
        from mindspeed_llm.training import utils

        before = utils._ACTUAL_SEQ_LEN_LIST
        utils._ACTUAL_SEQ_LEN_LIST = ends
        try:
            yield
        finally:
            utils._ACTUAL_SEQ_LEN_LIST = before

    return scope


def _validated(arguments: Mapping[str, Any]) -> Namespace:
    from megatron.training.arguments import parse_args, validate_args

    with bare_command_line():
        full: Namespace = parse_args(ignore_unknown_args=True)
    check_names(arguments, vars(full))
    for name, value in arguments.items():
        setattr(full, name, value)
    try:
        full = validate_args(full)
    except (AssertionError, ValueError, RuntimeError) as error:
        raise EngineError(
            "MindSpeed-LLM refuses the arguments.",
            where="engine mindspeed_llm",
            why=str(error) or "an assertion of validate_args failed without a message; the worker's log has it",
            fix="change the configuration keys that set these arguments (docs/how-to/train-with-mindspeed-llm.md)",
        ) from error
    # Megatron's validate_args turns it off, whatever was given, and MindSpeed-LLM turns it on again for its own
    # fine-tuning only; without it pipeline stages would exchange tensors of one fixed shape.
    full.variable_seq_lengths = True
    changed = [name for name, value in arguments.items() if getattr(full, name) != value]
    if changed:
        raise EngineError(
            "MindSpeed-LLM changes arguments that the configuration sets.",
            where="engine mindspeed_llm",
            why=", ".join(f"{name}: {arguments[name]!r} became {getattr(full, name)!r}" for name in changed),
            fix="set values that MindSpeed-LLM keeps; its documentation says which arguments can be combined",
        )
    return full


def _forget_engine() -> None:
    from mindspeed.model.transformer import set_attention_mask
    from mindspeed_llm.training import utils

    set_attention_mask(None)
    utils._ACTUAL_SEQ_LEN_LIST = None
