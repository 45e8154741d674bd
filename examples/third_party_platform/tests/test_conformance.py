"""The conformance kit, as tests of this package: ``BASALT_DEVICES=8 pytest tests -k device``, for example."""

from anytron_conformance import conformance

test_conformance = conformance("basalt")
