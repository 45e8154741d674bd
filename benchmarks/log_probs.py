"""Log-probs and entropies of labels, forward and backward: the platform's kernel against the plain path.

``plain`` is what people write, as lean as autograd lets it be: the output layer, ``.float()``, the temperature in
place, ``log_softmax``, ``gather``, the entropy from ``exp``. At its peak it has four times the logits. Each side has a
process of its own, so that its peak is its own: of a processor the whole process's resident memory, of another device
what was allocated there at most. The two take turns; ratios are ours by theirs, of the medians of time. ``*_error`` is
a side's largest difference from the definition in float64, by the largest number of that, for the first 64 tokens in as
many tiles as all of them have; ``error`` is our largest one.

The device is the platform's (``ANYTRON_PLATFORM``); a processor gets 8192 tokens in float32, another device 32768 in
bfloat16. The hidden size is that of Qwen3-0.6B; a larger one is to the plain path's advantage in time, which has one
product with the vocabulary less. A side that does not fit in memory has no figures.

    python benchmarks/log_probs.py [--json] [--tokens N] [--vocabulary 151936] [--hidden 1024] [--chunk 256]
                                   [--dtype float32|bfloat16] [--turns 3]
"""

import multiprocessing
import re
import statistics
from pathlib import Path

import torch

from anytron.config.running import EngineSection
from anytron.config.schema import default_run
from anytron.device.hooks.types import ProcessInfo
from anytron.device.loading import open_process, open_session
from anytron.kernels.contract import LogProbSpec
from harness import argument_parser, in_turn, progress, report, timed

TEMPERATURE = 0.8
RESULTS = ("log_probs", "entropy", "hidden_gradient", "weight_gradient")
COMPARED = 64
"""Tokens whose results are compared."""
COLUMNS = {"peak": "peak_bytes", "time": "time_s"}


def plain(hidden, weight, labels, temperature=TEMPERATURE):
    log_probs = torch.log_softmax(torch.nn.functional.linear(hidden, weight).float().div_(temperature), dim=-1)
    chosen = log_probs.gather(-1, labels[:, None])[:, 0]  # first, so that its dense gradient is made last
    # The probabilities sum to 1, so sum(p * d log p) = 0: without that term, autograd keeps one tensor less.
    return chosen, -(log_probs.exp() * log_probs.detach()).sum(dim=-1)


def exact(hidden, weight, labels):
    """The definition, for operands in float64."""
    log_probs = torch.log_softmax(hidden @ weight.t() / TEMPERATURE, dim=-1)
    return log_probs.gather(-1, labels[:, None])[:, 0], -(log_probs.exp() * log_probs).sum(dim=-1)


class Problem:
    """Operands from one seed, the same in every process, and what each side makes of them."""

    def __init__(self, arguments, session):
        generator = torch.Generator().manual_seed(0)
        device = session.platform.runtime().current_device()
        dtype = getattr(torch, arguments.dtype)

        def normal(*size):
            return torch.randn(*size, generator=generator)

        self._arguments, self._session = arguments, session
        self._hidden = normal(arguments.tokens, arguments.hidden).to(device, dtype)
        # Logits of standard deviation 2: neither flat nor certain.
        weight = normal(arguments.vocabulary, arguments.hidden).mul_(2 * arguments.hidden**-0.5)
        self._weight = weight.to(device, dtype)
        self._labels = torch.randint(arguments.vocabulary, (arguments.tokens,), generator=generator).to(device)
        self._cotangents = normal(2, arguments.tokens).to(device)

    def kernel(self, tokens):
        """The platform's kernel, with as many tiles for so many tokens as it has for all."""
        arguments, hidden = self._arguments, self._hidden
        chunk = max(1, arguments.chunk * tokens // arguments.tokens)
        spec = LogProbSpec(arguments.vocabulary, 1, chunk, hidden.device.type, hidden.dtype)
        kernel = self._session.hooks.log_prob_kernel(spec)
        return lambda *operands: kernel(*operands, TEMPERATURE, None)

    def compute(self, score, tokens, dtype=None):
        """Give RESULTS for the first tokens."""
        operands = [operand.to(dtype or operand.dtype) for operand in (self._hidden[:tokens], self._weight)]
        hidden, weight = (operand.detach().requires_grad_() for operand in operands)
        scores = score(hidden, weight, self._labels[:tokens])
        gradients = torch.autograd.grad(scores, (hidden, weight), list(self._cotangents[:, :tokens]))
        return *(one.detach() for one in scores), *gradients

    def errors(self, score):
        """How far RESULTS are from those in float64."""
        tokens = min(COMPARED, self._arguments.tokens)
        pairs = zip(self.compute(score(tokens), tokens), self.compute(exact, tokens, torch.float64), strict=True)
        differences = ((mine - right).abs().max() / right.abs().max() for mine, right in pairs)
        return {f"{name}_error": float(one) for name, one in zip(RESULTS, differences, strict=True)}


def work(name, arguments, connection):
    """A side's process: computes when it is told to, then says how much memory that took, and how exact it is."""
    session = open_session()
    runtime = session.platform.runtime()
    problem = Problem(arguments, session)

    def score(tokens):
        return problem.kernel(tokens) if name == "ours" else plain

    runtime.reset_peak_memory_stats()
    while connection.recv() == "compute":
        connection.send(timed(lambda: problem.compute(score(arguments.tokens), arguments.tokens), runtime)[0])
    peak = peak_bytes(runtime)
    runtime.empty_cache()  # what this side keeps, the other one may need
    connection.send(peak)
    connection.recv()
    connection.send(problem.errors(score))


def peak_bytes(runtime):
    if runtime.device_type != "cpu":
        return runtime.memory_stats().peak_allocated
    return int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024


class Side:
    """A process that computes one side when it is told to; once it is dead, its answers are None."""

    def __init__(self, name, arguments):
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=work, args=(name, arguments, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def seconds(self):
        return self._ask("compute")

    def peak(self):
        """Give the peak of memory, and free what the process keeps."""
        return self._ask("peak")

    def errors(self):
        """Give the errors; the process ends."""
        errors = self._ask("errors")
        self._process.join()
        return errors

    def _ask(self, what):
        try:
            self._connection.send(what)
            return self._connection.recv()
        except (EOFError, ConnectionError):
            return None


def measure(arguments):
    sides = {name: Side(name, arguments) for name in ("ours", "plain")}
    progress("one turn that does not count, and those that do")
    times = in_turn({name: side.seconds for name, side in sides.items()}, arguments.turns)
    peaks = {name: side.peak() for name, side in sides.items()}
    rows = {}
    for name, side in sides.items():
        progress(f"how exact {name} is")
        errors = side.errors()
        found = {"time_s": statistics.median(times[name]), "peak_bytes": peaks[name], **errors} if errors else None
        rows[name] = found or {"time_s": None}
    figures = {name: getattr(arguments, name) for name in ("tokens", "vocabulary", "hidden", "chunk")}
    ours, theirs = rows.values()
    if ours["time_s"] and theirs["time_s"]:
        # torch cannot tell the peak of memory on every device
        known = {name: column for name, column in COLUMNS.items() if ours[column] is not None}
        figures |= {f"{name}_ratio": ours[column] / theirs[column] for name, column in known.items()}
    if ours["time_s"]:
        figures["error"] = max(ours[f"{name}_error"] for name in RESULTS)
    return {**figures, "side": rows}


def main():
    parser = argument_parser(__doc__)
    # Both sides' allocators are a training rank's.
    session = open_process(ProcessInfo("trainer"), default_run(), platform=None, engine=None)
    runtime = session.platform.runtime()
    on_processor = runtime.device_type == "cpu"
    chunk = EngineSection.model_fields["log_prob_chunk_tokens"].default
    parser.add_argument("--tokens", type=int, default=8192 if on_processor else 32768)
    parser.add_argument("--vocabulary", type=int, default=151936, help="entries; Qwen3's")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--chunk", type=int, default=chunk, help="engine.log_prob_chunk_tokens")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32" if on_processor else "bfloat16")
    parser.add_argument("--turns", type=int, default=3, help="measurements of each side, after one that is not")
    arguments = parser.parse_args()
    figures = measure(arguments)
    report(figures, as_json=arguments.json, runtime=runtime)
    if figures["side"]["ours"]["time_s"] is None:
        raise SystemExit("Our side ended early; its traceback is above.")


if __name__ == "__main__":
    main()
