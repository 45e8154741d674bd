"""A rebuild frees the engine before it builds the next one."""

import gc
import weakref

import pytest

from anytron.base.garbage import exempt_objects
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


def test_an_engine_is_closed_and_freed_before_the_next_one_is_built():
    engines, alive = [], []

    def build(config, init_method):
        alive.append([known() is not None for known, _ in engines])
        engine = Engine(f"{config['name']} {init_method}")
        engines.append((weakref.ref(engine), engine.closed))
        return engine

    holder, observer = EngineHolder(build), RankObserver(None)

    for name in ("first", "second", "third"):
        holder.build({"name": name}, "tcp")
        assert decode(holder.answer(Call("whose", ("engine",), {}), observer)).value == f"engine {name} tcp"
    gc.collect()

    assert alive == [[], [False], [False, False]]
    assert [closed for _, closed in engines] == [[True], [True], []]
    holder.close()
    assert [closed for _, closed in engines] == [[True]] * 3


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
