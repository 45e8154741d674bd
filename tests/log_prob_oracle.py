"""Log-probs, entropies and their gradients by definition, in float64, and what a kernel makes of the same operands."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from anytron.kernels.contract import LogProbSpec
from anytron.kernels.log_prob import make_log_prob


@dataclass(frozen=True)
class Problem:
    """Operands in float64, labels of which some are ignored, and the gradient of the loss for both results."""

    hidden: Tensor
    weight: Tensor
    labels: Tensor
    upstream: Tensor
    entries: int
    temperature: float

    @classmethod
    def random(cls, seed, tokens, entries, *, padding=0, size=5, temperature=1.0, dtype=torch.float32):
        """Numbers that the dtype of the kernel's operands can hold; logits of standard deviation ``size ** 0.5``."""
        generator = torch.Generator().manual_seed(seed)
        hidden = torch.randn(tokens, size, generator=generator)
        weight = torch.randn(entries + padding, size, generator=generator)
        labels = torch.randint(-1, entries, (tokens,), generator=generator)
        labels[labels < 0] = -100
        upstream = torch.randn(2, tokens, generator=generator).double()
        hidden, weight = (operand.to(dtype).double() for operand in (hidden, weight))
        return cls(hidden, weight, labels, upstream, entries, temperature)

    def by_definition(self, dtype=torch.float64, cap=None, scale=1.0):
        """Log-probs, entropies, and the gradients of hidden states and weight; ``cap`` limits the scaled logits."""
        hidden, weight = (operand.to(dtype, copy=True).requires_grad_() for operand in (self.hidden, self.weight))
        logits = hidden @ weight[: self.entries].t()
        logits = logits if cap is None else cap * torch.tanh(logits * scale / cap)
        distribution = torch.distributions.Categorical(logits=logits / self.temperature, validate_args=False)
        real = self.labels >= 0
        results = distribution.log_prob(self.labels.clamp(min=0)) * real, distribution.entropy() * real
        return *results, *torch.autograd.grad(results, (hidden, weight), tuple(self.upstream.to(dtype)))

    def by_kernel(self, chunk_tokens=16, arithmetic=None, dtype=torch.float32, device="cpu", *, invariant=False):
        """The same."""
        hidden, weight = (operand.to(device, dtype).requires_grad_() for operand in (self.hidden, self.weight))
        kernel = make_log_prob(LogProbSpec(self.entries, 1, chunk_tokens, device, dtype, invariant), arithmetic)
        results = kernel(hidden, weight, self.labels.to(device), self.temperature, None)
        upstream = tuple(self.upstream.float().to(device))
        return *(one.detach() for one in results), *torch.autograd.grad(results, (hidden, weight), upstream)


NAMES = ("log_probs", "entropy", "hidden", "weight")


def assert_close(actual, expected, *, tolerance=1e-5):
    """Compare what :class:`Problem` gives, or the first of it, each by its largest number or 1."""
    for name, mine, right in zip(NAMES[: len(expected)], actual, expected, strict=True):
        error = (mine.double().cpu() - right).abs().max().item() if right.numel() else 0.0
        allowed = tolerance * max(1.0, right.abs().max().item() if right.numel() else 0.0)
        assert error <= allowed, f"{name} differs by {error:.2e}"


class LargestTensor(TorchDispatchMode):
    """Records how large the largest tensor is that any operation returned."""

    bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        made = result if isinstance(result, tuple | list) else [result]
        self.bytes = max([self.bytes, *(one.nbytes for one in made if isinstance(one, Tensor))])
        return result
