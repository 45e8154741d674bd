"""Rules of log-prob kernels."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from anytron.device.platform import Feature
from anytron.kernels.contract import LogProbSpec
from anytron.kernels.oracles.formulas import reference_log_probs
from anytron_conformance.compare import assert_close
from anytron_conformance.kernels.comparison import Comparison, drawn, in_dtypes, sliced, split_off
from anytron_conformance.ranks import on_ranks
from anytron_conformance.rules import Case, rule

if TYPE_CHECKING:
    from anytron.kernels.contract import LogProbKernel
    from anytron_conformance.ranks import Member
    from anytron_conformance.subject import Subject

HIDDEN = 16
NAMES = ("log-prob", "entropy")
FACTOR = {torch.float32: 1.0, torch.bfloat16: 2.0}
"""Factor of the usual tolerance: a kernel may round logits to 16 bits, and probabilities change by as much as those."""


@dataclass(frozen=True)
class Problem:
    """Inputs and settings of one test of a log-prob kernel.

    Attributes:
        labels: Label of each token; negative = ignored.
        entries: Size of the vocabulary.
        padding: Number of padding rows of the output layer.
        temperature: Logits are divided by it.
        chunk_tokens: ``LogProbSpec.chunk_tokens``, which bounds the logits that exist at the same time.
        ranks: Number of ranks that share the vocabulary.
    """

    labels: tuple[int, ...]
    entries: int = 13
    padding: int = 0
    temperature: float = 1.0
    chunk_tokens: int = 1024
    ranks: int = 1

    def kernel(self, subject: Subject, dtype: torch.dtype) -> LogProbKernel:
        """Return the log-prob kernel that a model gets for such tokens."""
        spec = LogProbSpec(self.entries, self.ranks, self.chunk_tokens, subject.device.type, dtype)
        return subject.hooks.log_prob_kernel(spec)

    def operands(self) -> dict[str, Tensor]:
        """Hidden states ``[N, H]`` and the output layer's weight ``[V, H]``."""
        # Logits of standard deviation 2.
        hidden = drawn(len(self.labels), HIDDEN) / 2
        return {"hidden states": hidden, "output layer's weight": drawn(self.entries + self.padding, HIDDEN, seed=1)}

    def defined(self, hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the expected results from the definition."""
        labels = torch.tensor(self.labels, dtype=torch.int64)
        return reference_log_probs(hidden, weight, labels, entries=self.entries, temperature=self.temperature)

    def compared(
        self, subject: Subject, dtype: torch.dtype, score: LogProbKernel | None = None, **others: Any
    ) -> Comparison:
        """Return the comparison of a kernel (``score``, or the one of the hooks) with its definition.

        ``others`` are fields of :class:`Comparison`.
        """
        labels = torch.tensor(self.labels, dtype=torch.int64, device=subject.device)
        found = score or self.kernel(subject, dtype)
        rows = torch.arange(self.entries + self.padding) >= self.entries
        settings: dict[str, Any] = {
            "operands": self.operands(),
            "dtype": dtype,
            "outputs": NAMES,
            "result_dtype": torch.float32,
            "meaningless": {"output layer's weight": rows},
            "empty": torch.tensor(self.labels, dtype=torch.int64) < 0,
            "because": "the label is ignored",
            "factor": FACTOR[dtype],
            **others,
        }
        return Comparison(
            lambda hidden, weight: found(hidden, weight, labels, self.temperature, None),
            self.defined,
            **settings,
        )


def _tokens(count: int, entries: int = 13) -> tuple[int, ...]:
    return tuple(5 * token % entries for token in range(count))


@rule(
    "log-probs",
    "kernels",
    "Log-probs of the labels, entropies and gradients equal their definition, softmax(hidden weight^T).",
    cases=in_dtypes(
        (f"{tokens} tokens, {entries} entries", Problem(_tokens(tokens, entries), entries), ())
        for tokens, entries in ((1, 2), (3, 13), (0, 13), (33, 301))
    ),
)
def log_probs(subject: Subject, case: Case) -> None:
    """Score tokens, and compare both results and the gradients of hidden states and weight with float64.

    The loss depends on log-probs and entropies at once. Both results are float32 whatever the operands are.
    """
    dtype, problem = case.values
    problem.compared(subject, dtype).hold(subject)


@rule(
    "log-probs-gradients",
    "kernels",
    "Each of the two results has its whole gradient, whichever operands are trained.",
    cases=in_dtypes(
        (f"of {' and '.join(NAMES[one] for one in chosen)}, {name}", (chosen, frozen), ())
        for chosen in ((0,), (1,), (0, 1))
        for name, frozen in (
            ("hidden states frozen", ("hidden states",)),
            ("weight frozen", ("output layer's weight",)),
            ("nothing frozen", ()),
        )
    ),
)
def separate_gradients(subject: Subject, case: Case) -> None:
    """Let the loss depend on one of the results or both, with one of the operands frozen or none.

    An entropy bonus needs the entropy's gradient, and a loss without this bonus does not use it; LoRA freezes the
    weight. With a kernel that detaches the entropy or omits the output layer's gradient, training goes on, but learns
    less.
    """
    dtype, (chosen, frozen) = case.values
    problem = Problem(_tokens(5))
    whole = problem.compared(subject, dtype, frozen=frozen)
    replace(
        whole,
        kernel=lambda *operands: tuple(whole.kernel(*operands)[one] for one in chosen),
        definition=lambda *operands: tuple(whole.definition(*operands)[one] for one in chosen),
        outputs=[NAMES[one] for one in chosen],
    ).hold(subject)


@rule(
    "log-probs-temperature",
    "kernels",
    "The temperature divides the logits, for the entropy too.",
    cases=in_dtypes(
        (f"temperature {temperature}", Problem(_tokens(5), temperature=temperature), ())
        for temperature in (0.7, 1.0, 1.7)
    ),
)
def tempered(subject: Subject, case: Case) -> None:
    """Score tokens at several temperatures. At temperature 1, a kernel that ignores the temperature would pass."""
    dtype, problem = case.values
    problem.compared(subject, dtype).hold(subject)


@rule(
    "log-probs-ignored-labels",
    "kernels",
    "A negative label is ignored: log-prob and entropy are 0, and neither has a gradient.",
    cases=in_dtypes(
        (name, Problem(labels), ())
        for name, labels in {
            "labels -100": (-100,),
            "labels 3 -100": (3, -100),
            "labels -1 12 -100 0 -1": (-1, 12, -100, 0, -1),
        }.items()
    ),
)
def ignoring(subject: Subject, case: Case) -> None:
    """Score tokens of which some have the label -100 or -1.

    The gradient that comes in for them is not 0, because prompts, padding and other ranks' tokens also receive one.
    """
    dtype, problem = case.values
    problem.compared(subject, dtype).hold(subject)


@rule(
    "log-probs-vocabulary-padding",
    "kernels",
    "Rows of the output layer from the vocabulary's size on have no probability, and a gradient of 0.",
    cases=in_dtypes(
        (f"{entries} entries and {padding} rows", Problem(_tokens(5, entries), entries, padding), ())
        for entries, padding in ((2, 1), (13, 3), (13, 115))
    ),
)
def padded_vocabulary(subject: Subject, case: Case) -> None:
    """Score tokens with an output layer that is larger than the vocabulary, as Megatron pads it.

    The padding rows hold ordinary numbers: a kernel that counts them gives every label too little probability.
    """
    dtype, problem = case.values
    problem.compared(subject, dtype).hold(subject)


@rule(
    "log-probs-chunks",
    "kernels",
    "Results do not depend on how the vocabulary and the tokens are divided to save memory.",
    cases=in_dtypes(
        (
            f"{len(labels)} tokens, {entries} entries, chunks of {chunk}",
            Problem(labels, entries, 3, 0.7, chunk),
            (),
        )
        for chunk, entries, labels in (
            (1, 13, _tokens(3)),
            (2, 13, _tokens(5)),
            (1, 2600, (0, 1023, 1024, 1025, 2047, 2048, 2599, -100, 127, 128, 129)),
            (4, 2600, (2599, 0, 1280, 1279, 1281)),
        )
    ),
)
def chunked(subject: Subject, case: Case) -> None:
    """Score more tokens than ``spec.chunk_tokens``, with labels on both sides of likely borders."""
    dtype, problem = case.values
    problem.compared(subject, dtype).hold(subject)


@rule(
    "log-probs-large-logits",
    "kernels",
    "Logits of 10000 and more give finite, exact results: softmax is taken of differences to the largest.",
    cases=in_dtypes((f"logits up to {size:g}", size, ()) for size in (128.0, 16384.0, -16384.0)),
)
def extreme(subject: Subject, case: Case) -> None:
    """Score tokens whose logits overflow ``exp``; the two highest logits are equal.

    The products are exact in every dtype, so that rounding explains no difference; the expected entropy is log 2.
    """
    dtype, size = case.values
    problem = Problem((0, 3, 5, 1), 6)
    hidden, weight = torch.zeros(4, HIDDEN), torch.zeros(6, HIDDEN)
    hidden[:, 0] = size
    hidden[2, 0] = size / 4
    weight[:, 0] = torch.tensor([1.0, 1.0, 0.5, -1.0, -1.0, 0.0])
    operands = {"hidden states": hidden, "output layer's weight": weight}
    problem.compared(subject, dtype, operands=operands).hold(subject)


@rule(
    "log-probs-strides",
    "kernels",
    "Hidden states, weight and the gradients that come in may lie in memory with any strides.",
    cases=in_dtypes(
        (name, lay, ()) for name, lay in (("parts of one tensor", split_off), ("every other number", sliced))
    ),
)
def strided(subject: Subject, case: Case) -> None:
    """Pass operands, and incoming gradients, that are views of larger tensors."""
    dtype, lay = case.values
    Problem(_tokens(5), padding=3).compared(subject, dtype, lay=lay).hold(subject)


@rule(
    "log-probs-tensor-parallel",
    "kernels",
    "With tensor parallelism every rank has both results whole, and its own part of the gradient of hidden states.",
    needs=(Feature.TENSOR_PARALLEL,),
    limit_s=180.0,
    cases=in_dtypes(
        (name, problem, ())
        for name, problem in {
            "4 entries": Problem((0, 3, 1), 4, ranks=2),
            "13 entries and 3 rows": Problem((0, 12, -100, 7, 8), 13, 3, 0.7, ranks=2),
            "5 entries and 7 rows, none of them real on rank 1": Problem((0, 4, 2), 5, 7, ranks=2),
            "2599 entries and 1 row, chunks of 1": Problem((0, 1299, 1300, 2598, -1), 2599, 1, 0.7, 1, ranks=2),
        }.items()
    ),
)
def tensor_parallel(subject: Subject, case: Case) -> None:
    """Share the rows of the output layer between two ranks, and compare with the definition on one.

    Rank r has the rows from ``r * V / 2`` on. The gradients of hidden states are added up over the ranks here, as
    Megatron's backward pass does: a kernel that does so itself counts them twice.
    """
    dtype, problem = case.values
    on_ranks(subject, 2, score_on_rank, problem, dtype)


def score_on_rank(member: Member, problem: Problem, dtype: torch.dtype) -> None:
    """Score tokens with this rank's rows of the output layer, and compare results and gradients with the definition."""
    import torch.distributed as dist

    subject = member.subject
    hidden, weight = (operand.to(dtype) for operand in problem.operands().values())
    height = len(weight) // member.size
    mine = slice(member.rank * height, (member.rank + 1) * height)
    exact = [operand.double().requires_grad_() for operand in (hidden, weight)]
    expected = problem.defined(*exact)
    incoming = [drawn(len(problem.labels), seed=seed) for seed in (100, 101)]
    wanted = torch.autograd.grad(expected, exact, [one.double() for one in incoming])

    leaves = [operand.to(subject.device).requires_grad_() for operand in (hidden, weight[mine])]
    labels = torch.tensor(problem.labels, device=subject.device)
    score = problem.kernel(subject, dtype)
    results = score(leaves[0], leaves[1], labels, problem.temperature, dist.group.WORLD)
    found = torch.autograd.grad(results, leaves, [one.to(subject.device) for one in incoming], allow_unused=True)
    of_hidden = torch.zeros_like(leaves[0], dtype=torch.float32) if found[0] is None else found[0].float()
    dist.all_reduce(of_hidden)  # before anything is raised: the other rank waits
    for name, one, right in zip(NAMES, results, expected, strict=True):
        assert_close(one, right, f"The {name}", dtype=dtype, factor=FACTOR[dtype])
    assert_close(
        of_hidden,
        wanted[0],
        "The gradient of the hidden states, summed over the ranks,",
        dtype=dtype,
        factor=FACTOR[dtype],
    )
    what = "The gradient of this rank's rows of the output layer"
    assert_close(found[1], wanted[1][mine], what, dtype=dtype, factor=FACTOR[dtype])


RULES = (
    log_probs,
    separate_gradients,
    tempered,
    ignoring,
    padded_vocabulary,
    chunked,
    extreme,
    strided,
    tensor_parallel,
)
