"""A rebuild frees the engine before it builds the next one."""

import gc
import weakref

import pytest

from anytron.base.garbage import exempt_objects, no_exemptions
from anytron.workers.executor.channel import Call, decode
from anytron.workers.executor.observer import RankObserver
from anytron.workers.executor.worker import EngineHolder


class Engine:
    """An engine whose parts refer to each other, as modules do."""

    def __init__(self, name):
        self.name, self.closed = name, []
        self.part = {"of": self}

    def whose(self, greeting):
        return f"{greeting} {self.name}"

    def close(self):
        self.closed.append(True)


@pytest.fixture(autouse=True)
def _exempt_again():
    yield
    exempt_objects()  # as tests/conftest.py leaves it


def exempt_before():
    """What the tests' modules are."""


def exempt_in_a_build():
    """As where a build applies patches."""
    with no_exemptions():
        pass


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("first", "in_each_build"),
    [(gc.unfreeze, exempt_before), (exempt_before, exempt_before), (exempt_objects, exempt_in_a_build)],
    ids=["nothing is exempt", "modules are exempt", "each build exempts its engine"],
)
def test_an_engine_is_closed_and_freed_before_the_next_one_is_built(first, in_each_build):
    engines, alive, left = [], [], []

    def build(config, init_method):
        alive.append([known() is not None for known, _ in engines])
        engine = Engine(f"{config['name']} {init_method}")
        engines.append((weakref.ref(engine), engine.closed))
        left.append(weakref.ref(Engine("that no build keeps")))
        in_each_build()
        return engine

    first()
    holder, observer = EngineHolder(build), RankObserver(None)

    for name in ("first", "second", "third"):
        holder.build({"name": name}, "tcp")
        assert decode(holder.answer(Call("whose", ("engine",), {}), observer)).value == f"engine {name} tcp"
        assert gc.get_freeze_count() > 10_000, "modules are exempt"
        if in_each_build is exempt_before:
            assert [one() for one in left] == [None] * len(left), "a build leaves no garbage"
    gc.collect()

    assert alive == [[], [False], [False, False]]
    assert [closed for _, closed in engines] == [[True], [True], []]
    holder.close()
    assert [closed for _, closed in engines] == [[True]] * 3


@pytest.mark.slow
def test_modules_are_looked_at_once_for_all_engines(monkeypatch):
    """A look at all objects takes ten times as long as the build of a tiny engine."""
    whole = []
    monkeypatch.setattr(gc, "unfreeze", lambda unfreeze=gc.unfreeze: whole.append(unfreeze()))
    gc.unfreeze()
    holder = EngineHolder(lambda config, init_method: Engine(""))
    looks = []
    for _ in range(4):
        whole.clear()
        holder.build({}, "tcp")
        looks.append(len(whole))
    assert looks == [1, 1, 0, 0], "at the first engine, and when the first is freed, which is exempt with the modules"


def test_a_build_that_fails_leaves_nothing_to_close():
    def build(config, init_method):
        if config:
            raise ValueError("no engine")
        return Engine("")

    holder = EngineHolder(build)
    holder.build({}, "tcp")
    with pytest.raises(ValueError, match="no engine"):
        holder.build({"a": 1}, "tcp")
    holder.close()
