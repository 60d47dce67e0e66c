"""Test serve.py as a process: the newcomer's path of docs/serving.md, kills under load, SIGTERM."""

import contextlib
import json
import re
import resource
import runpy
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import numpy as np
import pytest

import serve
from serving import Recommender
from tests.programs.test_train import run, start
from tests.support.forked import Forked

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--cache-bytes", str(2**24)]  # the default of 1 GiB takes longer to clear than to use


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("serving") / "run"
    done = start(folder, "train.epochs=1")
    assert done.returncode == 0, done.stderr
    return folder


@contextlib.contextmanager
def serving(folder, *options, log=None, main=serve.main, python=None, **how):
    """Yield (the process, a client) of serve.py on a free port; kill the process at the end if it still runs.

    main: an importable function to run in place of serve.py; python: start this interpreter, not a fork; how: see
    `Forked`.
    """
    arguments = [folder, "--port", "0", "--device", "cpu", *SMALL, *options, *([] if log is None else ["--log", log])]
    arguments = list(map(str, arguments))
    if python:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        process = subprocess.Popen([python, ROOT / "serve.py", *arguments], cwd=folder, **pipes)
    else:
        process = Forked(main, arguments, cwd=folder, **how)
    try:
        output = ""
        for line in process.stdout:
            output += line
            if address := re.search(r"Serving on (http://127\.0\.0\.1:\d+)", line):
                break
        else:
            raise AssertionError(output + process.stderr.read())
        process.output = output
        with httpx.Client(base_url=address[1], timeout=600) as client:
            yield process, client
    finally:
        process.kill()
        process.communicate()


def ended(process):
    """Return (exit status, standard error) of a process that is about to end."""
    _, err = process.communicate()
    return process.returncode, err


def exchanged(client, run):
    """Replace the model by a run; wait while --watch has not ended an exchange whose result can be seen already."""
    while (answer := client.post("/model", json={"run": run}).json()).get("error", {}).get("name") == "Loading":
        time.sleep(0.02)
    return answer


def known_items(folder):
    return np.load(folder / "vocabulary" / "item_ids.npy").tolist()


def test_the_first_commands_of_the_docs(trained, tmp_path):
    """Run the calls of curl in the first block of docs/serving.md, on a smaller run; compare its other commands."""
    text = (ROOT / "docs" / "serving.md").read_text()
    commands = re.search(r"```sh\n(.*?)```", text, re.S)[1].replace("\\\n", " ").strip().splitlines()
    train, serve, ready, post, get = (re.sub(r"\s+#.*", "", command) for command in commands)
    assert train.startswith("python train.py configs/synthetic-hstu.yaml --out runs/first")
    assert serve == "python serve.py runs/first --history --port 8000 &"
    with serving(trained, "--history", log=tmp_path / "events.log") as (process, client):
        for command in (ready, post, get):
            assert command.startswith("curl -s ") and "localhost:8000" in command
            done = subprocess.run(
                command.replace("http://localhost:8000", str(client.base_url)),
                shell=True, capture_output=True, text=True, timeout=600,
            )  # fmt: skip
            answer = json.loads(done.stdout)
            assert "error" not in answer, answer
        assert len(answer["items"]) == 3
        process.send_signal(signal.SIGTERM)
        assert ended(process) == (0, "")


def test_kill_under_load_then_a_start(trained, tmp_path):
    """After a kill, all acknowledged events are there in each user's order, and the service works as before."""
    items, log = known_items(trained), tmp_path / "events.log"
    acknowledged = {user: 0 for user in "abcd"}
    with serving(trained, log=log) as (process, client):
        enough = threading.Event()

        def write(user):
            with (
                contextlib.suppress(httpx.HTTPError),
                httpx.Client(base_url=client.base_url, timeout=600) as connection,
            ):
                for i in range(10**6):
                    event = {"user": user, "item": items[i % len(items)], "timestamp": i}
                    assert connection.post("/events", json={"events": [event]}).status_code == 200
                    acknowledged[user] = i + 1
                    if min(acknowledged.values()) >= 5:
                        enough.set()

        writers = [threading.Thread(target=write, args=(user,)) for user in acknowledged]
        for writer in writers:
            writer.start()
        assert enough.wait(600)
        process.kill()
        for writer in writers:
            writer.join()
    with log.open("ab") as file:
        file.write(b"0123abcd {")  # an incomplete line, as a kill may leave it
    with serving(trained, log=log) as (process, client):
        for user, count in acknowledged.items():
            history = client.get(f"/users/{user}").json()
            # One more event may have been written without being acknowledged.
            assert count <= history["count"] <= count + 1
            assert history["timestamps"] == list(range(history["count"]))[-len(history["timestamps"]) :]
        assert client.get("/users/a/recommendations").status_code == 200
        process.send_signal(signal.SIGTERM)
        assert ended(process) == (0, "")


def test_sigterm_answers_what_was_accepted(trained, tmp_path):
    """Requests that are running when the signal arrives are answered, and their events are in the log."""
    item = known_items(trained)[0]
    answered, refused = [0] * 4, []
    with serving(trained, log=tmp_path / "events.log") as (process, client):
        begun = threading.Semaphore(0)

        def write(number):
            with httpx.Client(base_url=client.base_url, timeout=600) as connection:
                for i in range(10**6):
                    try:
                        answer = connection.post("/events", json={"events": [{"user": f"u{number}", "item": item}]})
                    except httpx.ConnectError:
                        return  # the service no longer listens
                    except httpx.HTTPError as error:
                        # A kept-alive connection is closed between two requests.
                        refused.append(error)
                        return
                    assert answer.status_code in (200, 503)
                    answered[number] += answer.status_code == 200
                    if i == 3:
                        begun.release()

        writers = [threading.Thread(target=write, args=(number,)) for number in range(4)]
        for writer in writers:
            writer.start()
        for _ in writers:
            assert begun.acquire(timeout=600)
        process.send_signal(signal.SIGTERM)
        for writer in writers:
            writer.join()
        assert ended(process) == (0, "")
    records = (tmp_path / "events.log").read_bytes().count(b'"users"')
    # A request whose connection was closed before it was read was not accepted: each record has its answer.
    assert sum(answered) == records, (answered, records, refused)


def delete_then_kill(trained, log):
    """Delete a user of the run's data and another one, then kill the service; return the first one's id."""
    item, user = known_items(trained)[0], np.load(trained / "vocabulary" / "user_ids.npy").tolist()[0]
    with serving(trained, "--history", log=log) as (process, client):
        assert client.get(f"/users/{user}").json()["count"] > 1
        assert client.delete(f"/users/{user}").json() == {"forgotten": True}
        log.rename(log.with_name("aside"))
        assert client.post("/events", json={"events": [{"user": user, "item": item}]}).status_code == 507
        second = run("serve.py", trained, *SMALL, "--port", "0", "--log", log)
        assert second.returncode == 2 and "another process is using this log" in second.stderr and not log.exists()
        log.with_name("aside").rename(log)
        for name in ("a/b", user):
            assert client.post("/events", json={"events": [{"user": name, "item": item}]}).status_code == 200
        assert client.delete("/users/a%2Fb").json() == {"forgotten": True}
        process.kill()
        assert "the event log was moved or deleted" in process.communicate()[1]
    return user


def check_on_a_full_disk(process, client, user):
    """Check that a service without room to rewrite its log still answers, without the deleted users."""
    assert "1 events of deleted users remain in it" in process.output
    assert client.get(f"/users/{user}").json()["count"] == 1 and client.get("/users/a%2Fb").status_code == 404
    # The last page of the file may have room for a few marks.
    assert any(client.delete(f"/users/{user}").status_code == 507 for _ in range(300))
    process.send_signal(signal.SIGTERM)
    assert ended(process)[0] == 0


def test_deletions_outlive_a_kill_and_a_full_disk(trained, tmp_path):
    """A deleted user of the run's data stays deleted, and has only later events, even if the log was renamed."""
    log = tmp_path / "events.log"
    user = delete_then_kill(trained, log)
    no_file_grows = ((resource.RLIMIT_FSIZE, 0),)
    with serving(trained, "--history", log=log, limits=no_file_grows) as (process, client):
        check_on_a_full_disk(process, client, user)
    assert log.stat().st_mode & 0o777 == 0o600


@pytest.mark.slow
@pytest.mark.skipif(
    subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True).returncode != 0,
    reason="needs the right to mount",
)
def test_a_full_file_system(trained, tmp_path):
    """Start on a tmpfs without a free page, in a separate mount namespace."""
    user = delete_then_kill(trained, tmp_path / "events.log")
    (tmp_path / "full").mkdir()
    program = tmp_path / "python"
    program.write_text(
        f"#!/bin/sh\nmount -t tmpfs -o size=64k none {tmp_path}/full && cp {tmp_path}/events.log {tmp_path}/full/\n"
        f'dd if=/dev/zero of={tmp_path}/full/rest 2>/dev/null\nexec {sys.executable} "$@"\n'
    )
    (tmp_path / "private").write_text(f'#!/bin/sh\nexec unshare -m sh {program} "$@"\n')
    (tmp_path / "private").chmod(0o755)
    log = tmp_path / "full" / "events.log"
    with serving(trained, "--history", log=log, python=tmp_path / "private") as (process, client):
        check_on_a_full_disk(process, client, user)


def test_a_folder_of_runs_serves_the_newest(trained, tmp_path):
    """Replace the model by --watch once a run is finished; events are kept, and SIGTERM still ends the service."""
    runs, item = tmp_path / "runs", known_items(trained)[0]

    def finish_run(name, created):
        shutil.copytree(trained, tmp_path / name)
        manifest = json.loads((trained / "run.json").read_text())
        (tmp_path / name / "run.json").write_text(json.dumps(manifest | {"created": created}))
        (tmp_path / name).rename(runs / name)

    runs.mkdir()
    done = run("serve.py", runs, "--watch", "--port", "0")
    assert done.returncode == 2 and "no finished run in it can be served" in done.stderr
    finish_run("day-1", "2026-01-01")
    done = run("serve.py", runs, "--floor", "HR@10=2", "--port", "0", *SMALL)
    assert done.returncode == 2 and "HR@10 is 0." in done.stderr and "expected at least 2" in done.stderr
    with serving(runs, "--watch", "--watch-seconds", "0.05") as (process, client):
        assert client.get("/health").json()["model"] == "day-1"
        post = lambda: client.post("/events", json={"events": [{"user": "ann", "item": item}]})
        assert post().json()["model"] == "day-1" and post().json()["accepted"] == 1
        finish_run("day-8", "2026-01-08")
        ends = time.monotonic() + 500
        while (answer := client.get("/users/ann/recommendations")).json()["model"] == "day-1":
            assert answer.status_code == 200 and time.monotonic() < ends
            time.sleep(0.05)
        assert answer.json()["model"] == "day-8" and client.get("/users/ann").json()["count"] == 2
        assert exchanged(client, "day-1") == {"model": "day-1", "previous": "day-8"} and post().json()["accepted"] == 1
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate()
        assert process.returncode == 0 and output.count(" replaced ") == 2 and not errors, (output, errors)
    with serving(runs) as (_, client):
        assert client.get("/users/ann").json()["count"] == 3 and client.get("/health").json()["model"] == "day-8"


def test_refused_at_the_start(trained, tmp_path):
    (tmp_path / "token").write_text("short\n")
    (tmp_path / "damaged.log").write_bytes(b"00000000 {}\n")
    for options, message in (
        (["--token-file", tmp_path / "token"], "expected a token of at least 16 ASCII characters"),
        (["--token-file", tmp_path / "none"], "cannot be read: No such file"),
        (["--log", tmp_path / "damaged.log"], "line 1 is damaged"),
        (["--log", tmp_path / "none" / "events.log"], "cannot be opened: No such file"),
        (["--watch"], "--watch: expected a folder of runs"),
        (["--floor", "NDCG@10"], "expected METRIC=VALUE"),
        (["--port", "70000"], "--port: expected 0 to 65535, got 70000"),
        (["--max-body", "0"], "--max-body: expected at least 1"),
        (["--cache", "9bit"], "cache: expected one of auto, fp32"),
        (["--slide", "0"], "slide: expected 1 to 20"),
        (["--host", "192.0.2.1"], "cannot listen on 192.0.2.1"),
    ):
        done = run("serve.py", trained, *SMALL, *options)
        assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr, (options, done)
    done = run("serve.py", tmp_path, "--port", "0")
    assert done.returncode == 2 and "not a run folder" in done.stderr


def test_a_run_is_loaded_with_its_history(trained, tmp_path, monkeypatch, capsys):
    """Run examples/recommend.py, which prints the list that the recommender returns; export item vectors."""
    items = known_items(trained)
    (tmp_path / "new.csv").write_text(f"user,item,timestamp\nnewcomer,{items[0]},10\nnewcomer,{items[1]},20\n")
    monkeypatch.setattr(sys, "argv", ["recommend.py", str(trained), str(tmp_path / "new.csv")])
    with pytest.raises(SystemExit) as ended_with:
        runpy.run_path(str(ROOT / "examples" / "recommend.py"), run_name="__main__")
    assert not ended_with.value.code
    printed = capsys.readouterr().out
    recommender = Recommender.load(trained, device="cpu", cache_bytes=2**24)
    recommender.append(["newcomer"] * 2, items[:2], [10, 20])
    lists, _ = recommender.recommend(["newcomer"], k=10)
    assert printed.splitlines()[-1] == "newcomer: " + ", ".join(map(str, lists[0]))
    whole = Recommender.load(trained, history=True, device="cpu", cache_bytes=2**24)
    assert whole.num_users == 200
    recommender.export(tmp_path / "vectors")
    names = {path.name for path in (tmp_path / "vectors").iterdir()}
    assert names == {"items.npy", "item_ids.npy", "items.parquet", "items.faiss"}
