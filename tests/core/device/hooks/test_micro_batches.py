"""What the facade checks of a micro-batch that a plugin has changed (:mod:`anytron.device.hooks.dispatch`)."""

from __future__ import annotations

import contextlib
import dataclasses

import pytest
import torch

from anytron import hookimpl
from anytron.base.errors import HookContractError
from anytron.device.loading import hooks_of
from anytron.sequences import scopes
from anytron.sequences.layout import LayoutConstraints, ModelInputs
from anytron.sequences.planning import plan_layout


@pytest.fixture
def inputs() -> ModelInputs:
    layout = plan_layout([3, 2])
    ids = layout.pack(torch.arange(5))
    return ModelInputs(layout, ids, layout.position_ids, layout.next_tokens(torch.arange(5)))


def _changing(**changes):
    """Hooks with a plugin that changes fields of a micro-batch; a function gets the inputs."""

    class Plugin:
        @hookimpl
        def preprocess_sequences(self, inputs):
            values = {name: change(inputs) for name, change in changes.items()}
            return dataclasses.replace(inputs, **values)

    return hooks_of(extensions={"acme": Plugin()})


def _rows_of_a_model_that_packs_by_itself():
    """Its positions are those of its rows, which are wider than any sequence of the packed layout."""
    layout = plan_layout([3, 2], input_layout="rows", constraints=LayoutConstraints(align=4))
    tokens = torch.arange(5)
    return ModelInputs(layout, layout.taken.pack(tokens), layout.taken.position_ids, layout.next_tokens(tokens))


def _three_axes():
    layout = plan_layout([3, 2], constraints=LayoutConstraints(align=4))
    tokens = torch.arange(5)
    positions = layout.pack_axes(torch.arange(15).view(3, 5))
    return ModelInputs(layout, layout.pack(tokens), positions, layout.next_tokens(tokens))


@pytest.mark.parametrize("make", [None, _rows_of_a_model_that_packs_by_itself, _three_axes], ids=["shard", "rows", "3"])
def test_preprocess_sequences_keeps_the_positions_of_real_tokens(inputs, make):
    inputs = make() if make else inputs
    for wrong in (lambda given: given.position_ids + 1, lambda given: torch.zeros_like(given.position_ids)):
        with pytest.raises(HookContractError, match=r"(?s)'acme'.*tokens must keep their positions.*position_ids\[0, "):
            _changing(position_ids=wrong).preprocess_sequences(inputs)
    _changing(position_ids=lambda given: given.position_ids.clone()).preprocess_sequences(inputs)


def test_preprocess_sequences_may_give_padding_other_positions():
    layout = plan_layout([3, 2], constraints=LayoutConstraints(align=4))
    inputs = ModelInputs(layout, layout.pack(torch.arange(5)), layout.position_ids, layout.next_tokens(torch.arange(5)))
    changed = _changing(position_ids=lambda given: given.position_ids.masked_fill(~layout.valid, 7))
    assert changed.preprocess_sequences(inputs).position_ids[0, 3] == 7


@contextlib.contextmanager
def _scope():
    yield


_SHARED = contextlib.nullcontext()


@pytest.mark.parametrize(
    ("scope", "why"),
    [
        (_scope(), "_GeneratorContextManager; return the function that makes it"),
        (3, "it is a int"),
        (lambda lengths: _scope(), "cannot be called without arguments"),
        (lambda: 3, "it made a int"),
        (lambda: _SHARED, "it made the same nullcontext twice; recomputation"),
    ],
    ids=["made", "number", "argument", "none", "shared"],
)
@pytest.mark.parametrize("others", [False, True], ids=["alone", "beside-another"])
def test_preprocess_sequences_gives_a_scope_that_can_be_entered_again(inputs, scope, why, others):
    """At the first micro-batch, also where nothing is recomputed, and also if it hides among other plugins' scopes."""
    inputs = dataclasses.replace(inputs, scope=contextlib.nullcontext if others else None)
    hooks = _changing(scope=lambda given: scopes.combine(given.scope, scope))
    with pytest.raises(HookContractError, match=r"(?s)'acme'.*a new context manager at each call.*") as caught:
        hooks.preprocess_sequences(inputs)
    assert why in caught.value.why


def test_preprocess_sequences_calls_a_right_scope_no_more_than_at_the_first_micro_batch(inputs):
    calls = []

    def scope():
        calls.append(1)
        return _scope()

    hooks = _changing(scope=lambda given: scopes.combine(given.scope, scope))
    for _ in range(3):
        with scopes.enter(hooks.preprocess_sequences(inputs).scope):
            pass
    assert len(calls) == 2 + 3
