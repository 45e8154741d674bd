"""What a platform declares not to do: in ``Platform.limits``, or by refusing a configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from anytron.base.errors import AnytronError
from anytron.config.schema import default_run
from anytron.device.platform import limits_of
from anytron.run.preflight.limits import SIZES, VALUES

if TYPE_CHECKING:
    from anytron.device.hooks.facade import Hooks
    from anytron.device.limits import Feature
    from anytron.device.platform import Platform


def declared_limits(platform: Platform, hooks: Hooks) -> dict[Feature, str]:
    """Collect the platform's reasons, by the features that it declares not to have.

    The hook ``configure`` is asked with a small configuration for each feature that is a matter of the configuration:
    an error at its key, or an edit that sets another value, is a declaration.
    """
    found = limits_of(platform)
    for feature, (key, value) in {**VALUES, **{feature: (key, 2) for feature, key in SIZES.items()}}.items():
        if feature not in found and (reason := _refusal(hooks, key, value)):
            found[feature] = reason
    return found


def _refusal(hooks: Hooks, key: str, value: Any) -> str:
    section, _, name = key.partition(".")
    asked = {section: {name: value}}
    if name == "expert_model_parallel_size":
        asked[section]["tensor_model_parallel_size"] = value
    try:
        edits, diagnostics = hooks.remarks(default_run(asked))
    except AnytronError:  # a rule of its own says what is wrong with the hook
        return ""
    for _, edit in edits:
        if edit.key == key and edit.value != value:
            return edit.reason
    return next((one.message for one in diagnostics if one.severity == "error" and one.key == key), "")
