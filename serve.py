"""Serve a run over HTTP: events in, recommendations and scores out (docs/serving.md).

python serve.py RUN [--port 8000] [--cache 2bit --sink-tokens 4] [--history]       on 127.0.0.1; /docs lists the routes
python serve.py RUN --host 0.0.0.0 --token-file FILE         for other machines; requests need the token in FILE
python serve.py DIR --watch          the newest finished run in DIR, replaced by each newer run once it is finished
"""

from cli.command import parse_early, serve_options, serving_options

if __name__ == "__main__":
    parse_early(serve_options, __doc__)

import argparse
import logging
import os
import sys
from pathlib import Path

import torch

from cli.interrupt import Interrupts
from cli.program import run_program
from cli.terminal import terminal
from data.types import shown
from serving import Recommender, ServingError
from serving.histories import keep_objects
from serving.http.app import Limits, create_app
from serving.http.event_log import EventLog, NotStored
from serving.http.redis_store import SharedUsers, connect
from serving.http.replay import replay
from serving.http.server import Server, listening, possible_connections
from serving.http.swap import Models, Requirements
from training.folder import access, read_regular
from training.monitor import explain_faults

SHORTEST_TOKEN = 16


def read_token(path: Path) -> str:
    """Return the token in a file; raise ServingError if it is too short or not printable ASCII."""
    with access(path, "read"):
        token = read_regular(path, 2**12).decode("utf-8", "replace").strip()
    if len(token) < SHORTEST_TOKEN or not token.isascii() or not token.isprintable():
        raise ServingError(f"{shown(path, 200)}: expected a token of at least {SHORTEST_TOKEN} ASCII characters")
    return token


def open_log(options: argparse.Namespace, recommender: Recommender, interrupts: Interrupts) -> EventLog:
    """Open the event log, add its events to the recommender, and remove events of deleted users from its files."""
    path = options.log or options.run / "events.log"
    interrupts.stage = f"replaying {path}"
    log = EventLog(path, fsync=options.fsync == "always")
    try:
        log.prepare()
    except NotStored as fault:
        terminal.say(f"{path}: {fault}; the next start takes longer")
    counts = replay(recommender, log)
    stale = log.stale
    if stale or log.replaced:
        try:
            log.compact()
            if stale:
                terminal.say(f"{path}: {stale:,} events of deleted users were removed")
        except NotStored as fault:
            rest = f"{stale:,} events of deleted users remain" if stale else "replaced lists and features remain"
            terminal.say(f"{path}: {fault}; {rest} in it until the next start")
    terminal.say(
        f"{recommender.num_users:,} users; {path}: {counts['taken']:,} events"
        + (f", {counts['left_out']:,} of unknown items or actions left out" if counts["left_out"] else "")
        + (f", {counts['repeated']:,} left out, since the run's data contain them, too" if counts["repeated"] else "")
        + f"; the model {recommender.label}"
    )
    return log


def work(options: argparse.Namespace, interrupts: Interrupts) -> None:
    """Load the run and the users, then serve until a signal arrives."""
    listening(options.host, options.port).close()  # errors of the address come before the run is loaded
    interrupts.stage = "loading the run"
    token = None if options.token_file is None else read_token(options.token_file)

    def load(run: Path) -> Recommender:
        recommender = Recommender.load(
            run,
            history=options.history,
            device=options.device,
            cache=options.cache,
            most_users=options.max_users,
            most_events=options.max_history,
            **serving_options(options),
        )
        if options.users is not None:
            recommender.add_users_of(options.users)
        return recommender

    models = None
    if not (options.run / "config.yaml").exists() and options.run.is_dir():
        models = Models(options.run, load, Requirements(options.floor, options.missing_items))
    elif wrong := [name for name in ("watch", "floor", "missing_items") if getattr(options, name)]:
        option = wrong[0].replace("_", "-")
        raise ServingError(f"--{option}: expected a folder of runs, got {shown(options.run, 200)}")
    recommender = load(options.run) if models is None else models.first()
    if recommender.config.threads is None and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() - 1))  # leave a core for HTTP
    log, store = None, None
    if options.store is None:
        log = open_log(options, recommender, interrupts)
    else:
        store = SharedUsers(connect(options.store, options.fsync == "always"), recommender)
        terminal.say(f"The model {recommender.label}; users are in Redis")
    connections = possible_connections(options.max_connections)
    limits = Limits(
        body=options.max_body,
        filter_body=options.max_filter_body,
        events=options.max_events,
        items=options.max_items,
        candidates=options.max_candidates,
        users=options.max_request_users,
        list=options.max_list,
        waiting=min(options.max_waiting, connections // 2),
    )
    watch = options.watch_seconds if options.watch else None
    app = create_app(recommender, log, token=token, limits=limits, store=store, models=models, watch=watch)
    del recommender, store  # otherwise their memory could not be freed when the model is replaced
    logging.getLogger("hstu_sparse.serve").setLevel(options.log_level.upper())
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # no warnings about clients that disconnect early
    logging.basicConfig(format="%(asctime)s %(name)s %(message)s")
    keep_objects()
    interrupts.stage = "serving"
    with listening(options.host, options.port) as listener, interrupts.deferred():
        Server(app, connections, interrupts).run(sockets=[listener])
        if log is not None:
            log.close()
        place = "the store" if options.store else "the log"
        terminal.say(f"Stopped; all accepted requests were answered, all accepted events are in {place}")
        interrupts.signal = 0  # so that no Stopped is raised


def main(arguments: list[str] | None = None) -> int:
    """Run the program; return the exit status."""
    options = serve_options(__doc__, arguments)
    return run_program(lambda interrupts: work(options, interrupts), options.quiet)


if __name__ == "__main__":
    explain_faults()
    sys.exit(main())
