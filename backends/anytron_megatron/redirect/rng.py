"""Redirect random numbers: ``torch.cuda``'s generators become the runtime's."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from anytron.base.errors import EngineError
from anytron_megatron.redirect.substitution import Substitution

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from anytron.device.runtime import DeviceRuntime
    from anytron_megatron.redirect.devices import DeviceTranslator


class GeneratorOfRuntime:
    """Stand in for the device's generator where torch has no access to it; the runtime does the work."""

    def __init__(self, runtime: DeviceRuntime) -> None:
        self._runtime = runtime
        self._seeding = False

    def get_state(self) -> Tensor:
        """Return the state, uint8, on the host."""
        return self._runtime.get_rng_state()

    def set_state(self, state: Tensor) -> None:
        """Restore a state that :meth:`get_state` returned."""
        self._runtime.set_rng_state(state)

    def manual_seed(self, seed: int) -> None:
        """Seed the device's generator.

        A runtime may seed by torch.manual_seed, which calls torch.cuda.manual_seed_all and so this method again.
        """
        if self._seeding:
            return
        self._seeding = True
        try:
            self._runtime.manual_seed(seed)
        finally:
            self._seeding = False

    def seed(self) -> int:
        """Seed the device's generator at random; return the seed."""
        seed = int.from_bytes(os.urandom(8), "little") >> 1
        self.manual_seed(seed)
        return seed

    def initial_seed(self) -> int:
        """Raise EngineError: the runtime does not know the seed."""
        raise EngineError(
            "The seed of the device's random number generator is unknown.",
            where=f"torch.cuda.initial_seed, device type {self._runtime.device_type}",
            why="the platform's runtime returns default_generator() = None",
            fix="override default_generator in the platform's runtime",
        )


class RuntimeGenerators(Sequence[torch.Generator]):
    """Replace ``torch.cuda.default_generators``, which Megatron's RNG tracker indexes."""

    def __init__(self, runtime: DeviceRuntime) -> None:
        self._runtime = runtime
        self._stand_in = GeneratorOfRuntime(runtime)

    def __len__(self) -> int:
        return self._runtime.device_count()

    def __getitem__(self, index: Any) -> Any:
        # One process uses one device, so every index means the current one.
        return self._runtime.default_generator() or self._stand_in


class RandomCalls:
    """The functions of ``torch.cuda.random``, under their own names.

    They seed the generator, and call ``runtime.manual_seed`` only if the generator is unknown: a runtime may implement
    that by torch.manual_seed, which calls torch.cuda.manual_seed_all.
    """

    def __init__(self, runtime: DeviceRuntime, generators: RuntimeGenerators) -> None:
        self._runtime, self._generators = runtime, generators

    def get_rng_state(self, device: Any = "cuda") -> Tensor:
        """Return the generator's state, uint8, on the host."""
        del device
        return self._runtime.get_rng_state()

    def set_rng_state(self, new_state: Tensor, device: Any = "cuda") -> None:
        """Restore a state that :meth:`get_rng_state` returned."""
        del device
        self._runtime.set_rng_state(new_state)

    def get_rng_state_all(self) -> list[Tensor]:
        """Return the state of the one device that this process uses."""
        return [self._runtime.get_rng_state()]

    def set_rng_state_all(self, new_states: Sequence[Tensor]) -> None:
        """Restore the states that :meth:`get_rng_state_all` returned."""
        (state,) = new_states
        self._runtime.set_rng_state(state)

    def manual_seed(self, seed: int) -> None:
        """Seed the device's generator."""
        self._generators[0].manual_seed(int(seed))

    def manual_seed_all(self, seed: int) -> None:
        """Seed the device's generator."""
        self.manual_seed(seed)

    def seed(self) -> None:
        """Seed the device's generator at random."""
        self._generators[0].seed()

    def seed_all(self) -> None:
        """Seed the device's generator at random."""
        self.seed()

    def initial_seed(self) -> int:
        """Return the seed of the device's generator.

        Raises:
            EngineError: The platform's runtime has no ``default_generator``, so the seed is unknown.
        """
        seed: int = self._generators[0].initial_seed()
        return seed


def substitutions(runtime: DeviceRuntime, translate: DeviceTranslator) -> Iterator[Substitution]:
    """Replace the seed and state functions of ``torch.cuda`` and ``torch.cuda.random``, and ``torch.Generator``."""
    generators = RuntimeGenerators(runtime)
    calls = RandomCalls(runtime, generators)
    for name in (name for name, value in vars(RandomCalls).items() if callable(value) and name != "__init__"):
        call = getattr(calls, name)
        yield Substitution(torch.cuda, name, call)
        yield Substitution(torch.cuda.random, name, call)
    yield Substitution(torch.cuda, "default_generators", generators)
    yield Substitution(torch, "Generator", _generator_class(translate))


def _generator_class(translate: DeviceTranslator) -> type:
    """Make a class that builds real generators on the translated device and recognises all of them."""
    original = torch.Generator

    class AnyGenerator(type(original)):  # type: ignore[misc]
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, original)

    class Generator(original, metaclass=AnyGenerator):  # type: ignore[misc,valid-type]
        def __new__(cls, device: Any = "cpu") -> torch.Generator:  # type: ignore[misc]
            return original(device=translate(device))

    return Generator
