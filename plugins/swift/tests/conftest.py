"""Models and data that tests share, made once."""

import pytest

from plugins.swift.tests import trained


@pytest.fixture(scope="session")
def prepared(tmp_path_factory):
    made = {}

    def of(family):
        if family not in made:
            made[family] = trained.source(family).prepare(tmp_path_factory.mktemp(family), family)
        return made[family]

    return of
