"""The kit in a vendor's own tests: one pytest test per rule."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


def conformance(
    platform: str, level: str | Sequence[str] = (), options: Mapping[str, Any] | None = None
) -> Callable[..., None]:
    """Make a platform's test function.

    With ``test_conformance = conformance("acme", level="device")`` pytest makes one test per rule of that level, such
    as ``test_conformance[device.rng-round-trip]``. Rules and cases that require a feature which the platform lacks are
    skipped with the platform's reason; if only some cases of a rule are skipped, the test's properties count them.

    Args:
        platform: Name of the platform, as in ``platform.name``; it must be installed.
        level: Levels to check; by default all.
        options: ``platform.options``.

    Raises:
        ConfigError: A level does not exist.
    """
    import pytest

    from anytron_conformance.rules import checked_levels, rules_of
    from anytron_conformance.run import Checker
    from anytron_conformance.subject import Source

    levels = checked_levels([level] if isinstance(level, str) else list(level))
    rules = [rule for one in levels for rule in rules_of(one)]
    source = Source(platform, dict(options or {}))
    checkers: dict[str, Checker] = {}

    @pytest.mark.parametrize("rule", rules, ids=[rule.name for rule in rules])
    def test_conformance(
        rule: Any, request: pytest.FixtureRequest, record_property: Callable[[str, Any], None]
    ) -> None:
        if rule.level not in checkers:
            for other in checkers.values():
                other.close()
            directory = tempfile.TemporaryDirectory(prefix="anytron-conformance-")
            checkers[rule.level] = Checker(source, Path(directory.name))
            module = request.node.getparent(pytest.Module)
            module.addfinalizer(directory.cleanup)
            module.addfinalizer(checkers[rule.level].close)
        result = checkers[rule.level].check(rule)
        record_property("cases", result.cases)
        record_property("cases_skipped", result.skipped)
        if result.status == "failed":
            pytest.fail(result.explanation, pytrace=False)
        if result.status == "skipped":
            pytest.skip(result.detail)
        if result.skipped:
            request.node.add_report_section("call", "conformance", f"{result.skipped} cases skipped: {result.detail}")

    return cast("Callable[..., None]", test_conformance)
