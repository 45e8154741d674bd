"""The port where ranks meet is free, and stays so until they do."""

import socket

import pytest

from anytron.errors import WorkerError
from anytron.executor import address

ADDRESS = "127.0.0.1"


def ephemeral_range():
    low, high = map(int, address.EPHEMERAL.read_text().split())
    return range(low, high + 1)


def test_the_port_is_free_and_none_that_a_connection_may_get():
    for _ in range(20):
        port = address.free_port()
        assert port not in ephemeral_range()
        with socket.socket() as store:
            store.bind((ADDRESS, port))


def test_ports_in_use_are_left_out(monkeypatch, tmp_path):
    with socket.socket() as store:
        store.bind((ADDRESS, address.free_port()))
        taken = store.getsockname()[1]
        monkeypatch.setattr(address, "EPHEMERAL", tmp_path / "range")
        monkeypatch.setattr(address, "LOWEST", taken)
        monkeypatch.setattr(address, "ATTEMPTS", 1)
        (tmp_path / "range").write_text(f"{taken + 1}\t60999\n")
        with pytest.raises(WorkerError, match=r"(?s)no port.*all in use.*ss --listening"):
            address.free_port()


def test_where_the_kernel_gives_all_ports_it_gives_this_one_too(monkeypatch, tmp_path):
    (tmp_path / "range").write_text("1024\t65535\n")
    monkeypatch.setattr(address, "EPHEMERAL", tmp_path / "range")
    assert address.free_port() >= 1024
