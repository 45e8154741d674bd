from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest

from anytron.config.generation import EnvironmentSection
from anytron.config.imports import resolve
from anytron.run.rollout.conversations import Conversations
from anytron.run.rollout.turns import turns_of
from anytron.task.data.pretrained import TOKENIZER
from anytron.task.environments.pool import EnvironmentPool
from anytron.workers.engines.rollout_engine import SamplingParams
from tests.core.run.rollout.pupil import EXAMPLE, QUESTIONS, Pupil, prompt
from tests.core.run.rollout.replicas import Executor, pool_of, two_steps, weights


@pytest.fixture(scope="module")
def expected():
    steps = two_steps(pool_of(Executor(), 1))
    assert [len(groups) for groups in steps] == [10, 10]
    assert {len(group) for groups in steps for group in groups} == {4}
    assert len({response.tokens for groups in steps for group in groups for response in group}) > 60
    assert {version for group in steps[1] for response in group for version in response.versions} == {2}
    return steps


@pytest.fixture(scope="module")
def tokenizer():
    return resolve(f"{EXAMPLE}:tokenizer", TOKENIZER)()


@pytest.fixture
def converse(tmp_path, tokenizer):
    """Have the pupil, or another of its class, answer all questions, ``count`` times each."""
    with contextlib.ExitStack() as stack:

        def make(
            seed=0,
            count=2,
            ask=Pupil.ask,
            context_length=None,
            replicas=2,
            path=f"{EXAMPLE}:Calculator",
            disturb=lambda turns, pool, executor: None,
            **section,
        ):
            def engine(number, order):
                pupil = Pupil(order)
                pupil.tokenizer, pupil.ask = tokenizer, ask
                return pupil

            executor = Executor(seed, engine)
            pool = pool_of(executor, replicas)
            pool.load_weights(weights(1))
            settings = EnvironmentSection(path=path, **section)
            environments = stack.enter_context(EnvironmentPool(settings, tmp_path / "logs", 60))
            sampling = SamplingParams(max_new_tokens=8, min_new_tokens=1)
            prepared = SimpleNamespace(
                tokenizer=tokenizer,
                sampling=sampling,
                context_length=context_length,
                vocab_size=17,
                chat_template_kwargs={},
            )
            config = SimpleNamespace(environment=settings)
            turns = turns_of(config, prepared, pool, environments)
            assert isinstance(turns, Conversations)
            begun = turns.begin([prompt(tokenizer, question) for question in QUESTIONS], count, seed=5)
            disturb(turns, pool, executor)
            found = turns.finish(begun)
            return found, [request for group in executor.groups for request in group.engine.seen]

        yield make
