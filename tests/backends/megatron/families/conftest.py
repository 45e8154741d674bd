"""Observe each layout of each family once; write the figures into the documentation if asked to."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from anytron.base.errors import AnytronError
from tests.backends.megatron.families.observe import Figures, Observation, Truth, compare, observe
from tests.backends.megatron.families.table import measured_rows, write_page

if TYPE_CHECKING:
    from collections.abc import Callable

    from anytron.sequences.batch import RaggedBatch
    from tests.backends.megatron.families.layouts import Layout, Model

OPTION = "--families-table"
_figures: pytest.StashKey[dict[tuple[str, str], Figures]] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(OPTION, metavar="PAGE", type=Path, help="write the figures of this run into PAGE")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_figures] = {}


def pytest_sessionfinish(session: pytest.Session) -> None:
    page = session.config.getoption(OPTION)
    if page is not None:
        write_page(page, measured_rows(session.config.stash[_figures]))


@pytest.fixture(scope="session")
def trajectories_of(recorded, recorded_images) -> Callable[[Model], RaggedBatch]:
    return lambda model: recorded_images if model.family.takes_images else recorded


@pytest.fixture(scope="session")
def truth_of(tiny_family, trajectories_of) -> Callable[[Model], Truth]:
    truths: dict[str, Truth] = {}

    def get(model: Model) -> Truth:
        if model.name not in truths:
            truths[model.name] = Truth.of(tiny_family(model.name), trajectories_of(model), model.learning_rate)
        return truths[model.name]

    return get


@pytest.fixture(scope="session")
def observed(ranks, tiny_family, truth_of, policy_loss, tmp_path_factory) -> Callable[[Model, Layout], Observation]:
    scratch = tmp_path_factory.mktemp("observed")
    observations: dict[tuple[str, str], Observation | Exception] = {}

    def get(model: Model, layout: Layout) -> Observation:
        key = model.name, layout.name
        if key not in observations:
            try:
                observations[key] = observe(
                    ranks, tiny_family(model.name), layout, truth_of(model), policy_loss, scratch
                )
            except AnytronError as error:  # once: every failure costs the processes
                observations[key] = error
        observation = observations[key]
        if isinstance(observation, Exception):
            raise observation
        return observation

    return get


@pytest.fixture(scope="session")
def figures_of(observed, truth_of, pytestconfig) -> Callable[[Model, Layout], Figures]:
    """Give the figures of a layout; they are kept for the table."""

    def get(model: Model, layout: Layout) -> Figures:
        figures = compare(observed(model, layout), observed(model, model.layouts[0]), truth_of(model))
        pytestconfig.stash[_figures][model.name, layout.name] = figures
        return figures

    return get
