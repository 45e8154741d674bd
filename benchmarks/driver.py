"""What a step costs the driver, by tokens and ranks, with simulated ranks that answer without computing.

The driver's parts of a GRPO step with two mini-batches: responses are received and checked, samples become a batch, the
batch is scored, and each mini-batch is an update. Texts and rewards are left out. A pass plans micro-batches, selects
and encodes each replica's share, sends it, and joins the answers. Lengths of responses are log-normal (median 1,100
tokens, at most 8,192), prompts have 256 tokens, micro-batches 16,384, and a replica has 16 ranks. Each line is measured
in a process of its own, on one core. Time that simulated ranks take is not counted. A message for several ranks is
copied once, as a store that machines share would.

    python benchmarks/driver.py [--json] [--ranks 16 128 1024] [--tokens 1 8 64]
"""

import json
import resource
import subprocess
import sys
import time
from contextlib import contextmanager
from itertools import count

import torch

from anytron.algorithms.losses import SupervisedLoss
from anytron.config.running import ExecutorSection
from anytron.run.rollout.replica import mistake_in
from anytron.run.trainer.experience import assemble
from anytron.run.trainer.updates import UpdatePlan
from anytron.run.trainer.workers import TrainingWorkers
from anytron.sequences.batch import TokenOutputs
from anytron.task.rewards.sample import Sample
from anytron.workers.engines.rollout_engine import GenerationRequest, PromptInputs, Response, SamplingParams
from anytron.workers.engines.training_engine import Topology
from anytron.workers.executor.channel import Result, decode, encode
from anytron.workers.executor.group import RankGroup
from harness import argument_parser, progress, report

PROMPT, LONGEST, LIMIT, OF_A_REPLICA, VOCABULARY = 256, 8192, 16384, 16, 150_000
AT_ONCE = 64
"""Responses in a message of a rollout process."""


class Bill:
    """Seconds that simulated ranks took, and bytes that were encoded and that were sent."""

    def __init__(self):
        self.outside_s, self.encoded, self.sent = 0.0, 0, 0

    @contextmanager
    def outside(self):
        start = time.process_time()
        yield
        self.outside_s += time.process_time() - start


class SimulatedRank:
    """Answers each call at once: scores and metrics are 0."""

    where = "simulated"

    def __init__(self, number, place, bill):
        self.name, self._place, self._bill = f"simulated rank {number}", place, bill
        self._answer = lambda: None

    def send(self, message):
        self._bill.sent += len(message)
        if self._place.reports and message:
            with self._bill.outside():
                call = decode(message)
                sizes = [batch.num_tokens for batch in call.args[0]] if call.args else []
                self._answer = {"topology": lambda: self._place, "score": lambda: scores(sizes)}.get(
                    call.method, lambda: {"grad_norm": 1.0, "lr": 1.0, "update/skipped": 0.0}
                )
        else:
            self._answer = lambda: self._place

    def receive(self):
        with self._bill.outside():
            return encode(Result(self._answer()))

    def wait(self, timeout_s):
        del timeout_s
        return False

    def write_stacks(self):
        pass

    def standing(self):
        return None

    def fate(self):
        return "it is simulated"

    def log_tail(self):
        return ""


def scores(sizes):
    return [TokenOutputs(log_probs=-torch.rand(size), entropy=torch.rand(size)) for size in sizes]


class SimulatedGroup(RankGroup[SimulatedRank]):
    """Ranks that are all ready whenever they are awaited."""

    def __init__(self, places):
        self.bill = Bill()
        ranks = [SimulatedRank(number, place, self.bill) for number, place in enumerate(places)]
        super().__init__("simulated", ranks, ExecutorSection())

    @property
    def hosts(self):
        raise NotImplementedError

    @staticmethod
    def answered(ranks, timeout_s):
        del timeout_s
        return ranks

    def _carried(self, message, receivers):
        self.bill.encoded += len(message)
        return bytearray(message) if receivers > 1 else message

    def _new_store(self):
        raise NotImplementedError

    def _end_all(self):
        pass


def received(tokens):
    """Draw prompts and responses of about so many tokens in all, eight of each prompt; some in each rollout message."""
    generator = torch.Generator().manual_seed(0)
    prompt: tuple[int, ...] = ()
    some = []
    for number in count():
        if tokens <= 0 or len(some) == AT_ONCE:
            yield [prompt for prompt, _ in some], encode(Result([response for _, response in some]))
            some = []
        if tokens <= 0:
            return
        length = int(torch.empty(1).log_normal_(7.0, 0.8, generator=generator).clamp(1, LONGEST))
        if number % 8 == 0:
            prompt = tuple(torch.randint(VOCABULARY, (PROMPT,), generator=generator).tolist())
        drawn = torch.randint(VOCABULARY, (length,), generator=generator).tolist()
        log_probs = (-torch.rand(length, generator=generator)).tolist()
        some.append((prompt, Response(drawn, log_probs, "stop", [0] * length)))
        tokens -= PROMPT + length


def samples_of(prompts, message):
    """Take a message of responses as the driver does, without texts."""
    sampling = SamplingParams(max_new_tokens=LONGEST)
    for prompt, response in zip(prompts, decode(message).value, strict=True):
        assert mistake_in(response, GenerationRequest(0, PromptInputs(prompt), sampling, 0), [0]) is None
        yield Sample("", "", "", prompt, response.tokens, response.log_probs, finished=True, data={})


def measure(ranks, tokens):
    torch.set_num_threads(1)
    replicas = max(1, ranks // OF_A_REPLICA)
    places = [Topology(dp_rank=rank % replicas, dp_size=replicas, reports=rank < replicas) for rank in range(ranks)]
    group = SimulatedGroup(places)
    figures = {}

    @contextmanager
    def part(name):
        bill, start = group.bill, time.process_time()
        outside, encoded, sent = bill.outside_s, bill.encoded, bill.sent
        yield
        figures[f"{name}_s"] = time.process_time() - start - (bill.outside_s - outside)
        if bill.encoded > encoded:
            figures[f"{name}_bytes_a_token"] = (bill.encoded - encoded) / tokens
            figures[f"{name}_messages_gb"] = (bill.sent - sent) / 1e9

    with part("start"):
        workers = TrainingWorkers.of(group)
    samples = []
    with part("receive"):
        messages = received(tokens)
        while True:
            with group.bill.outside():
                found = next(messages, None)
            if found is None:
                break
            samples += samples_of(*found)
    with part("assemble"):
        groups = torch.arange(len(samples)) // 8
        batch = assemble(samples, 1.0, groups)
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    del samples
    plan = UpdatePlan(epochs=1, count=2, aggregation="token-mean", max_tokens=LIMIT)
    with part("score"):
        batch = workers.with_scores(batch, plan, reference=False)
    with part("update"):
        for mini_batch in plan.mini_batches(batch, seed=0):
            workers.update(mini_batch, plan, SupervisedLoss())
    figures["driver_s"] = sum(value for name, value in figures.items() if name.endswith("_s"))
    figures["samples_gb"] = held
    figures["peak_gb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    return figures


def main():
    parser = argument_parser(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 128, 1024], help="numbers of training ranks")
    parser.add_argument("--tokens", type=float, nargs="+", default=[1, 8, 64], help="tokens of a step, in millions")
    parser.add_argument("--one", action="store_true", help="measure the first of both, in this process")
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(arguments.ranks[0], int(arguments.tokens[0] * 1e6))))
        return
    lines = [(ranks, arguments.tokens[-1]) for ranks in arguments.ranks]
    lines += [(arguments.ranks[-1], tokens) for tokens in arguments.tokens[:-1]]
    rows = {}
    for ranks, tokens in lines:
        progress(f"{ranks} ranks, {tokens:g} million tokens")
        own = [sys.executable, __file__, "--one", "--ranks", str(ranks), "--tokens", str(tokens)]
        done = subprocess.run(own, stdout=subprocess.PIPE, check=True, text=True)
        rows[f"{ranks} ranks, {tokens:g} million tokens"] = json.loads(done.stdout)
    report({"steps": rows}, as_json=arguments.json)


if __name__ == "__main__":
    main()
