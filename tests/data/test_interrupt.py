"""Test the progress of a preparation, and Ctrl-C at every stage."""

import os
import signal
import threading

import numpy as np
import pytest

from data import prepare, progress
from tests.data.raw_files import GOOD, events

pytest.importorskip("polars")  # it reads raw files


@pytest.fixture
def release():
    """Return an event on which a preparation waits; it is set at the end, so that the thread ends."""
    event = threading.Event()
    yield event
    event.set()
    for thread in threading.enumerate():
        if thread.name == "preparation":
            thread.join()


@pytest.fixture
def ctrl_c(release):
    """Return a function that sends SIGINT to this process and then waits, as a long library call does."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def send():
        os.kill(os.getpid(), signal.SIGINT)
        release.wait()

    yield send
    signal.signal(signal.SIGINT, before)


def test_interrupted_while_it_reads(load, tmp_path, monkeypatch, ctrl_c):
    monkeypatch.setattr(prepare, "read_raw", lambda *args: ctrl_c())
    with pytest.raises(KeyboardInterrupt):
        load("ml-100k", GOOD)
    monkeypatch.undo()
    assert not (tmp_path / "cache").exists()
    assert load("ml-100k", tmp_path / "raw.txt").num_events == 16


@pytest.mark.parametrize("call", [1, 3, 6])
def test_interrupted_while_it_writes(load, tmp_path, monkeypatch, ctrl_c, release, call):
    save, calls = np.save, []

    def saved(*args, **kwargs):
        save(*args, **kwargs)
        calls.append(1)
        if len(calls) == call:
            ctrl_c()

    monkeypatch.setattr(np, "save", saved)
    with pytest.raises(KeyboardInterrupt):
        load("ml-100k", GOOD)
    assert list((tmp_path / "cache").iterdir()) == []
    release.set()
    for thread in threading.enumerate():
        if thread.name == "preparation":
            thread.join()
    assert list((tmp_path / "cache").iterdir()) == []
    monkeypatch.undo()
    again = load("ml-100k", tmp_path / "raw.txt")
    assert len(events(again)) == 16


def test_progress_is_reported(load, tmp_path, monkeypatch):
    messages, heard = [], threading.Event()
    original = prepare.read_raw

    def read(name, fmt, sources, fingerprint, handling, scratch, now):
        now.stage("reading raw.txt")
        assert heard.wait(600)
        return original(name, fmt, sources, fingerprint, handling, scratch, now)

    def tell(line):
        messages.append(line)
        if line.startswith("reading raw.txt, "):
            heard.set()

    monkeypatch.setattr(prepare, "read_raw", read)
    monkeypatch.setattr(progress, "EVERY", 0)
    assert load("ml-100k", GOOD, report=tell).num_events == 16
    assert any(line.startswith("reading raw.txt, ") and line.endswith(" s") for line in messages)


def test_error_of_a_preparation_is_raised_in_the_caller(load, monkeypatch):
    def fail(*args):
        raise ZeroDivisionError("deep inside")

    monkeypatch.setattr(prepare, "read_raw", fail)
    with pytest.raises(ZeroDivisionError, match="deep inside"):
        load("ml-100k", GOOD)
