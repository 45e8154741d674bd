"""The device's random numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from anytron.proof.checks import Inapplicable
from anytron_conformance.rules import Broken, Case, rule

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from anytron_conformance.subject import Subject

DRAWS: dict[str, Callable[[torch.device], Tensor]] = {
    "rand": lambda device: torch.rand(7, device=device),
    "randn": lambda device: torch.randn(7, device=device),
    "randint": lambda device: torch.randint(0, 1 << 30, (7,), device=device),
    "dropout": lambda device: torch.nn.functional.dropout(torch.ones(64, device=device), 0.5),
    "multinomial": lambda device: torch.multinomial(torch.ones(97, device=device), 5),
    "many numbers": lambda device: torch.rand(70_001, device=device),
}
CASES = [Case(name, name, index) for index, name in enumerate(DRAWS)]


@rule(
    "rng-round-trip",
    "device",
    "A random state that was saved and is restored draws the same numbers again.",
    cases=CASES,
)
def rng_round_trip(subject: Subject, case: Case) -> None:
    """Seed, draw, save, draw, restore, draw: the last two draws are equal, and so are the states after them.

    Recomputation and checkpoints rely on this. Usual faults: the state of another generator is saved, or a state is
    accepted but not set.
    """
    runtime, draw = subject.runtime, DRAWS[case.values]
    runtime.manual_seed(1234)
    draw(subject.device)
    state = runtime.get_rng_state()
    if state.dtype != torch.uint8 or state.device.type != "cpu":
        raise Broken("The state is not a uint8 tensor on the host.", f"{state.dtype} on {state.device}")
    kept = state.clone()
    first = draw(subject.device)
    if not torch.equal(state, kept):
        raise Broken("Drawing numbers changes a state that was saved before: it is not a copy.")
    runtime.set_rng_state(state)
    if not torch.equal(runtime.get_rng_state(), kept):
        raise Broken("After a state is set, reading it gives a different state.")
    if not torch.equal(draw(subject.device), first):
        raise Broken("Other numbers were drawn after the state was restored.")


@rule(
    "seeds-decide",
    "device",
    "The same seed draws the same numbers, and another seed draws other numbers.",
    cases=CASES,
)
def seeds_decide(subject: Subject, case: Case) -> None:
    """Draw after seeding with 1, with 2, and with 1 again.

    Ranks get different seeds, and a run is repeated with the same seeds.
    """
    draws = []
    for seed in (1, 2, 1):
        subject.runtime.manual_seed(seed)
        draws.append(DRAWS[case.values](subject.device))
    if not torch.equal(draws[0], draws[2]):
        raise Broken("The same seed drew other numbers.")
    if torch.equal(draws[0], draws[1]):
        raise Broken("Another seed drew the same numbers.")


@rule(
    "own-generator",
    "device",
    "default_generator() is the generator from which operations on the device draw.",
    cases=CASES,
)
def own_generator(subject: Subject, case: Case) -> None:
    """A draw on the device must change the generator's state; seeding it must have the effect of `manual_seed`."""
    runtime, draw = subject.runtime, DRAWS[case.values]
    generator = runtime.default_generator()
    if generator is None:
        raise Inapplicable("the generator is unknown: default_generator() gives None")
    if not isinstance(generator, torch.Generator):
        raise Broken("default_generator() does not return a torch.Generator.", f"{generator!r}")
    runtime.manual_seed(7)
    before = generator.get_state().clone()
    first = draw(subject.device)
    if torch.equal(generator.get_state(), before):
        raise Broken("A draw on the device leaves the state of default_generator() as it was.")
    generator.manual_seed(7)
    if not torch.equal(draw(subject.device), first):
        raise Broken("Seeding default_generator() does not decide what is drawn on the device.")
