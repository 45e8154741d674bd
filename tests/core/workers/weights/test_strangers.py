"""Who does not know the secret of a transfer over the network gets no weights, gives none, and holds up nobody."""

from __future__ import annotations

import contextlib
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from anytron.base.errors import TransferError
from anytron.workers.weights import network
from anytron.workers.weights.messages import new_secret
from anytron.workers.weights.network import NetworkReader
from tests.core.workers.weights.conftest import collect


@pytest.mark.parametrize("way", ["network"], indirect=True)
def test_a_reader_with_another_secret_is_refused_and_the_right_one_gets_its_weights(new_transfer, caplog):
    one = new_transfer()
    with ThreadPoolExecutor() as pool:
        sent = pool.submit(one.stream.send, [("a", torch.ones(2000))], 3, lambda name: False)
        stranger = replace(one.origin(0), carrier=replace(one.carrier, secret=new_secret()))
        with pytest.raises(TransferError, match="could not be authenticated"):
            collect(stranger)
        assert collect(one.origin(0))[0] == sent.result().version == 3
    assert "a connection from 127.0.0.1 was refused: the other end does not know the secret" in caplog.text


@pytest.mark.parametrize("way", ["network"], indirect=True)
def test_strangers_that_say_nothing_hold_up_nobody(new_transfer):
    one = new_transfer()
    with ThreadPoolExecutor() as pool, contextlib.ExitStack() as opened:
        sent = pool.submit(one.stream.send, [("a", torch.ones(2000))], 3, lambda name: False)
        silent = [
            opened.enter_context(socket.create_connection(one.carrier.sender)) for _ in range(network.CALLERS + 10)
        ]
        silent[0].settimeout(network.PROOF_S / 2)
        assert len(silent[0].recv(32, socket.MSG_WAITALL)) == 32
        assert silent[0].recv(1) == b"", "there are too many, and it has taken longest"
        began = time.monotonic()
        assert collect(one.origin(0))[0] == sent.result().version == 3
        assert time.monotonic() - began < network.PROOF_S / 2
        assert len(silent[-1].recv(1000)) == 32, "it was told a random number, and nothing else"


@pytest.mark.parametrize("way", ["network"], indirect=True)
def test_a_proof_has_one_deadline_however_slowly_its_bytes_come(new_transfer, monkeypatch):
    monkeypatch.setattr(network, "PROOF_S", 0.3)
    one = new_transfer()
    with ThreadPoolExecutor() as pool:
        sent = pool.submit(one.stream.send, [("a", torch.ones(2000))], 3, lambda name: False)
        began = time.monotonic()
        with socket.create_connection(one.carrier.sender) as slow, contextlib.suppress(OSError):
            for _ in range(60):  # of the 64 bytes of a proof
                slow.sendall(b"x")
                time.sleep(0.05)
        assert time.monotonic() - began < 2.5, "it was refused in the middle"
        assert collect(one.origin(0))[0] == sent.result().version == 3


@pytest.mark.parametrize("way", ["network"], indirect=True)
def test_a_transfer_ends_in_time_while_strangers_knock(new_transfer):
    one = new_transfer(timeout_s=0.5)
    with ThreadPoolExecutor() as pool:
        sent = pool.submit(one.stream.send, [], 3, lambda name: False)
        where, until = one.carrier.sender, time.monotonic() + 5.0
        with socket.create_connection(where), contextlib.suppress(OSError):
            while time.monotonic() < until:
                with socket.create_connection(where) as stranger:
                    stranger.sendall(bytes(64))
        with pytest.raises(TransferError, match="did not connect to receive its weights"):
            sent.result()
        assert time.monotonic() < until


@pytest.mark.parametrize("way", ["network"], indirect=True)
def test_a_recorded_proof_proves_nothing_again(new_transfer):
    """Somebody writes down all that a reader says, and says it again."""
    one, recorded = new_transfer(), bytearray()
    with ThreadPoolExecutor() as pool, socket.create_server(("127.0.0.1", 0)) as between:
        sent = pool.submit(one.stream.send, [("a", torch.ones(2000))], 3, lambda name: False)
        real = one.carrier.sender
        through = replace(one.origin(0), carrier=replace(one.carrier, sender=between.getsockname()))
        found = pool.submit(collect, through)
        caller, _ = between.accept()
        with caller, socket.create_connection(real) as called:
            called.settimeout(10.0)
            caller.settimeout(10.0)
            caller.sendall(called.recv(32, socket.MSG_WAITALL))
            recorded += caller.recv(64, socket.MSG_WAITALL)
            with socket.create_connection(real) as again:  # the true one waits in the middle of its proof
                again.settimeout(10.0)
                again.recv(32, socket.MSG_WAITALL)
                again.sendall(recorded)
                assert again.recv(1000) == b"", "it is not answered"
        with pytest.raises(TransferError):
            found.result()
        assert collect(one.origin(0))[0] == sent.result().version == 3


@pytest.mark.parametrize("way", ["network"], indirect=True)
def test_a_reader_does_not_take_weights_from_another_sender(new_transfer):
    one = new_transfer()
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor() as pool:
        reader = replace(one.stream.origin(NetworkReader(listener.getsockname(), new_secret()), 0))
        found = pool.submit(collect, reader)
        connection, _ = listener.accept()
        with connection:
            connection.sendall(bytes(64))  # it repeats what it was told, at best
            connection.recv(1000)
            with pytest.raises(TransferError, match=r"(?s)could not be authenticated.*does not know the secret"):
                found.result()


@pytest.mark.parametrize("way", ["network"], indirect=True)
def test_the_driver_takes_no_port_from_a_stranger_and_rank_0_does_not_talk_to_another_driver(new_transfer):
    one, other = new_transfer(), new_transfer()
    lost = replace(one.stream, carrier=replace(one.meeting.sender, secret=new_secret()))
    with ThreadPoolExecutor() as pool:
        sent = pool.submit(lost.send, [], 3, lambda name: False)
        while not sent.done():
            assert one.meeting.reader() is None
        with pytest.raises(TransferError, match="could not be authenticated"):
            sent.result()
    wrong = replace(one.stream, carrier=replace(one.meeting.sender, driver=other.meeting.sender.driver))
    with ThreadPoolExecutor() as pool:
        sent = pool.submit(wrong.send, [], 3, lambda name: False)
        while not sent.done():
            assert other.meeting.reader() is None
        with pytest.raises(TransferError, match="could not be authenticated"):
            sent.result()


@pytest.mark.parametrize("way", ["network"], indirect=True)
def test_the_secret_is_in_no_text(new_transfer):
    one = new_transfer()
    for plain in (one.stream, one.stream.origin(NetworkReader(("x", 1), one.meeting.sender.secret), 0)):
        assert "secret" not in repr(plain)
