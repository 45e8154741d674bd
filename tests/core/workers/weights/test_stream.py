"""Weights arrive bit for bit or not at all, whatever carries them; nothing is left behind, whatever dies."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anytron.base.errors import EngineError, TransferError
from anytron.workers.weights import network, stream
from anytron.workers.weights.buckets import ALIGNMENT, Bucket
from anytron.workers.weights.network import NetworkMeeting
from anytron.workers.weights.stream import StreamedWeights
from tests.core.workers.executor.processes import listening
from tests.core.workers.weights.conftest import WAYS, Transfer, bits, collect, new_meeting

DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]


def send_and_receive(transfer, weights, version=3, is_optional=lambda name: False):
    """Send and receive in threads of this process; return what each reader found, or raise the sender's error."""
    with ThreadPoolExecutor() as pool:
        sent = pool.submit(transfer.stream.send, weights, version, is_optional)
        readers = [pool.submit(collect, transfer.origin(number)) for number in range(transfer.readers)]
        assert sent.result().version == version
        return [reader.result() for reader in readers]


def fails(transfer, weights, error, match):
    """Check that the only reader of weights fails in this way, and the sender does not."""
    with ThreadPoolExecutor() as pool:
        sent = pool.submit(transfer.stream.send, weights, 3, lambda name: False)
        with pytest.raises(error, match=match):
            collect(transfer.origin(0))
        assert sent.result().version == 3


def listens():
    """Addresses on which this process listens."""
    return listening(os.getpid())


@st.composite
def tensors(draw):
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 9), max_size=4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    numbers = torch.randint(0, 256, (int(torch.tensor(shape).prod()) * dtype.itemsize,), generator=generator)
    data = numbers.to(torch.uint8) if dtype is not torch.bool else numbers.to(torch.uint8) % 2
    tensor = data.view(dtype).reshape(shape)
    return tensor.transpose(0, -1) if len(shape) > 1 and draw(st.booleans()) else tensor


@given(st.lists(tensors(), max_size=12), st.integers(1, 8), st.integers(1, 2), st.sampled_from(WAYS))
def test_any_tensors_arrive_bit_for_bit_in_buckets_of_any_size(tmp_path_factory, weights, units, readers, way):
    folder, before = tmp_path_factory.mktemp("stream"), listens()
    named = {f"weight.{number}": tensor for number, tensor in enumerate(weights)}
    with new_meeting(way, folder) as meeting:
        transfer = Transfer(meeting, readers, 30.0, 64 * units)
        everywhere = send_and_receive(transfer, named.items(), is_optional=lambda name: name.endswith("1"))
    for version, found in everywhere:
        assert version == 3
        assert list(found) == list(named)
        for name, tensor in named.items():
            dtype, shape, optional, data = found[name]
            assert (dtype, shape, optional) == (tensor.dtype, tuple(tensor.shape), name.endswith("1"))
            assert torch.equal(data, bits(tensor))
    assert list(folder.iterdir()) == []
    assert listens() == before


@pytest.mark.parametrize("num_bytes", [0, 1, 63, 64, 100_000, 1 << 20, (1 << 24) - 1, 1 << 24, 1 << 40])
def test_small_weights_go_in_one_bucket_and_large_ones_in_buckets_of_the_usual_size(num_bytes):
    size = stream.bucket_bytes_for(num_bytes)
    assert size % ALIGNMENT == 0
    assert size == stream.BUCKET_BYTES or num_bytes < size <= max(2 * num_bytes, ALIGNMENT)


@pytest.mark.parametrize("way", ["shared_memory"], indirect=True)
def test_the_path_of_a_socket_may_be_long(new_transfer, tmp_path):
    name = "/".join(["deep"] * 40 + ["transfer"])
    (tmp_path / name).parent.mkdir(parents=True)
    deep = new_transfer(name=name)
    assert len(deep.carrier.path) > 200
    assert send_and_receive(deep, [("a", torch.ones(3))])[0][0] == 3


def test_rank_0_and_the_driver_listen_where_they_are_told_and_only_while_it_is_needed():
    before, seen = listens(), []

    def weights():
        seen.append(listens() - before)
        yield "a", torch.ones(3)

    with NetworkMeeting("127.0.0.2", "127.0.0.3") as meeting:
        assert listens() - before == {"127.0.0.2"}
        send_and_receive(Transfer(meeting, 1, 30.0, 4096), weights())
        assert listens() == before
    assert seen[0] - {"127.0.0.2"} == {"127.0.0.3"}


def test_an_address_that_is_not_the_machine_s_is_an_error_that_names_it():
    with pytest.raises(TransferError, match=r"(?s)Could not listen for the weight transfer.*192\.0\.2\.77"):
        NetworkMeeting("192.0.2.77", "127.0.0.1")


def test_a_damaged_bucket_is_refused(new_transfer, monkeypatch):
    real, calls = Bucket.checksum, []

    def checksum(self, used):
        calls.append(used)
        if len(calls) == 4:  # each bucket is computed at both ends: this is the second, as it is received
            self.data[5] ^= 1
        return real(self, used)

    monkeypatch.setattr(Bucket, "checksum", checksum)
    message = r"(?s)damaged in transfer.*bucket 1 of the weights of version 3.*XXH3"
    fails(new_transfer(), [("a", torch.ones(2000))], TransferError, message)


@pytest.mark.parametrize("way", ["network"], indirect=True)
def test_a_byte_that_changes_on_the_way_is_noticed(new_transfer, monkeypatch):
    real, sent = network._SenderEnd.send, []

    def send(self, connection, bucket, used):
        sent.append(used)
        if len(sent) == 2:  # after its checksum was computed
            bucket.data[used // 2] ^= 4
        real(self, connection, bucket, used)

    monkeypatch.setattr(network._SenderEnd, "send", send)
    message = r"(?s)damaged in transfer.*bucket 1 of the weights of version 3.*XXH3"
    fails(new_transfer(), [("a", torch.ones(2000))], TransferError, message)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda messages: messages.pop(0), "damaged in transfer"),
        (lambda messages: messages.pop(1), "Weights are missing"),
        (lambda messages: messages[1]["entries"].pop(), "missing"),
        (lambda messages: messages[0]["entries"].append(messages[0]["entries"][0]), "missing or arrived twice"),
        (lambda messages: messages[-1].update(tensors=3), "Weights are missing"),
    ],
    ids=["a-bucket", "the-last-bucket", "an-entry", "an-entry-twice", "a-tensor"],
)
@pytest.mark.parametrize("way", ["shared_memory"], indirect=True)
def test_what_is_not_told_of_is_noticed(new_transfer, monkeypatch, spoil, message):
    """A saboteur in the sender changes the tables of buckets."""
    real, held = stream.send, []

    def send(connection, message):
        if "reader" in message or "version" in message:
            real(connection, message)
        elif "done" not in message:
            held.append(message)
        if "tensors" in message:
            spoil(held)
            for one in held:
                real(connection, one)

    monkeypatch.setattr(stream, "send", send)
    monkeypatch.setattr(stream._Sender, "_await", lambda self, number: None)
    fails(new_transfer(), [("a", torch.ones(1000)), ("b", torch.ones(500))], TransferError, message)


def test_a_name_that_comes_twice_is_refused_by_the_sender(new_transfer, tmp_path):
    whole, twice = new_transfer(), [("a", torch.ones(2000)), ("a", torch.ones(2))]
    with ThreadPoolExecutor() as pool:
        sent = pool.submit(whole.stream.send, twice, 3, lambda name: False)
        with pytest.raises(TransferError, match="Only a part of the weights arrived"):
            collect(whole.origin(0))
        with pytest.raises(EngineError, match=r"(?s)exported twice.*a, weights of version 3"):
            sent.result()
    assert list(tmp_path.iterdir()) == []


def test_a_killed_sender_is_an_error_at_its_readers_at_once(new_transfer, start):
    two = new_transfer(readers=2)
    sender = start(two.stream, "5")
    readers = [start(two.origin(number)) for number in range(2)]
    assert sender.stdout.readline() == "stands\n"
    sender.kill()
    for reader in readers:
        assert reader.communicate(timeout=20)[0] == "TransferError: Only a part of the weights arrived.\n"


@pytest.mark.parametrize("way", ["shared_memory"], indirect=True)
def test_readers_may_come_before_their_sender(new_transfer, start):
    """If it is killed before it listens, the driver sees its death, and ends them."""
    one = new_transfer()
    reader = start(one.origin(0))
    sender = start(one.stream, "0")
    assert sender.stdout.readline() == "stands\n"
    assert reader.poll() is None


def test_a_killed_reader_costs_the_others_nothing(new_transfer, start, tmp_path):
    three = new_transfer(readers=3)
    sender = start(three.stream)
    readers = [start(three.origin(number), *rest) for number, rest in enumerate([(), ("4",), ()])]
    assert readers[1].stdout.readline() == "stands\n"
    readers[1].kill()
    for process in (sender, readers[0], readers[2]):
        assert process.communicate(timeout=20)[0] == "version 7\n"
    assert list(tmp_path.iterdir()) == []


def test_a_sender_does_not_wait_for_readers_that_were_withdrawn(new_transfer, start):
    three = new_transfer(readers=3)
    sender = start(three.stream)
    reader = start(three.origin(0))
    three.meeting.withdraw(2, lost=False)
    three.meeting.withdraw(1, lost=True)
    for process in (sender, reader):
        assert process.communicate(timeout=20)[0] == "version 7\n"


@pytest.mark.parametrize("way", ["network"], indirect=True)
def test_a_reader_whose_machine_is_gone_is_known_to_the_driver_alone(new_transfer, start):
    """No word comes from such a machine, not even of a connection's end: here the reader stands still."""
    two = new_transfer(readers=2)
    sender = start(two.stream)
    readers = [start(two.origin(number), *rest) for number, rest in enumerate([(), ("4",)])]
    assert readers[1].stdout.readline() == "stands\n"
    two.meeting.withdraw(1, lost=True)
    for process in (sender, readers[0]):
        assert process.communicate(timeout=20)[0] == "version 7\n"
    assert readers[1].poll() is None


def test_a_sender_without_any_reader_still_takes_all_weights_from_the_ranks(new_transfer):
    alone, taken = new_transfer(), []

    def weights():
        for number in range(5):
            taken.append(number)
            yield str(number), torch.ones(2000)

    with ThreadPoolExecutor() as pool:
        sent = pool.submit(alone.stream.send, weights(), 3, lambda name: False)
        assert alone.carrier
        alone.meeting.withdraw(0, lost=True)
        assert sent.result() == StreamedWeights(3, 5 * 8000)
    assert taken == [0, 1, 2, 3, 4]


def test_a_connection_has_a_limit_of_its_own_below_that_of_a_call(monkeypatch):
    tried = []

    def create_connection(called, timeout_s):
        tried.append(timeout_s)
        raise TimeoutError("timed out")

    monkeypatch.setattr(network.socket, "create_connection", create_connection)
    reader = network.NetworkReader(("127.0.0.1", 1), b"secret")
    for timeout_s in (3600.0, 2.0):
        with pytest.raises(TransferError, match="Could not open a connection"), reader.connect(timeout_s, 1 << 20):
            pass
    assert tried == [network.CONNECTED_S, 2.0]


def test_neither_end_waits_for_ever(new_transfer):
    two = new_transfer(readers=2, timeout_s=0.1)
    with ThreadPoolExecutor() as pool:
        sent = pool.submit(two.stream.send, [], 3, lambda name: False)
        origin = two.origin(0)
        with pytest.raises(TransferError, match=r"(?s)did not connect to receive its weights.*processes \[0, 1\] of 2"):
            sent.result()
    with pytest.raises(
        TransferError, match=r"did not begin to send weights|Could not open a connection for the weight transfer"
    ):
        collect(origin)


def test_each_end_uses_one_thread_while_it_copies(new_transfer):
    transfer, before = new_transfer(), torch.get_num_threads()

    def send():
        torch.set_num_threads(3)
        during = []
        weights = (during.append(torch.get_num_threads()) or ("a", torch.ones(4)) for _ in range(1))
        transfer.stream.send(weights, 3, lambda name: False)
        return during, torch.get_num_threads()

    def receive():
        torch.set_num_threads(3)
        with transfer.origin(0).open() as weights:
            during = [torch.get_num_threads() for _ in weights]
        return during, torch.get_num_threads()

    with ThreadPoolExecutor() as pool:
        ends = [pool.submit(send), pool.submit(receive)]
        assert [end.result() for end in ends] == [([1], 3)] * 2
    torch.set_num_threads(before)
