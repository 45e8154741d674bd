"""The conformance kit, as tests of this package: ``pytest tests``, or ``pytest tests -k device``."""

from anytron_conformance import conformance

test_conformance = conformance("acme")
