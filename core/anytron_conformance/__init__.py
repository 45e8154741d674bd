"""The conformance kit: rules that check, one by one, what a platform must do, on its own device.

``anytron conformance NAME`` runs it; :func:`conformance` puts it into a vendor's own tests::

    from anytron_conformance import conformance

    test_conformance = conformance("acme")

A rule is written with :func:`anytron_conformance.rules.rule`; ``docs/reference/conformance.md`` is generated from the
rules.
"""

from anytron_conformance.plugin import conformance

__all__ = ["conformance"]
