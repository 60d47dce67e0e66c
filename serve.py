"""Serve a run over HTTP: events in, recommendations and scores out (docs/serving.md).

python serve.py RUN [--port 8000] [--cache 2bit --sink-tokens 4] [--history]       on 127.0.0.1; /docs has the routes
python serve.py RUN --host 0.0.0.0 --token-file FILE                       for others, who need the token in the file
"""

from cli.command import answer_early, serve_options, serving_options

if __name__ == "__main__":
    answer_early(serve_options, __doc__)

import argparse
import logging
import sys
from pathlib import Path

from cli.interrupt import Interrupts
from cli.program import guarded
from cli.terminal import terminal
from data.types import shown
from serving import Recommender, ServingError
from serving.http.app import Limits, create_app
from serving.http.event_log import EventLog, NotStored
from serving.http.server import Server, listening, possible_connections
from serving.http.worker import replay
from training.folder import access, read_regular
from training.monitor import explain_faults

SHORTEST_TOKEN = 16


def read_token(path: Path) -> str:
    """Return the token in a file; ServingError for one that is too short to be safe."""
    with access(path, "read"):
        token = read_regular(path, 2**12).decode("utf-8", "replace").strip()
    if len(token) < SHORTEST_TOKEN or not token.isascii() or not token.isprintable():
        raise ServingError(f"{shown(path, 200)}: expected a token of at least {SHORTEST_TOKEN} ASCII characters")
    return token


def work(options: argparse.Namespace, interrupts: Interrupts) -> None:
    interrupts.stage = "loading the run"
    token = None if options.token_file is None else read_token(options.token_file)
    recommender = Recommender.load(
        options.run,
        history=options.history,
        device=options.device,
        cache=options.cache,
        most_users=options.max_users,
        most_events=options.max_history,
        **serving_options(options),
    )
    path = options.log or options.run / "events.log"
    interrupts.stage = f"replaying {path}"
    log = EventLog(path, fsync=options.fsync == "always")
    counts = replay(recommender, log)
    if stale := log.stale:
        try:
            log.compact()
            terminal.say(f"{path}: {stale:,} events of deleted users were removed")
        except NotStored as fault:
            terminal.say(f"{path}: {fault}; {stale:,} events of deleted users stay in it until the next start")
    terminal.say(
        f"{recommender.num_users:,} users; {path}: {counts['taken']:,} events"
        + (f", {counts['left_out']:,} left out that the run does not know" if counts["left_out"] else "")
    )
    connections = possible_connections(options.max_connections)
    limits = Limits(
        options.max_body,
        options.max_events,
        options.max_candidates,
        options.max_list,
        min(options.max_waiting, connections // 2),
    )
    app = create_app(recommender, log, token=token, limits=limits)
    logging.getLogger("hstu_sparse.serve").setLevel(options.log_level.upper())
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # otherwise clients that leave early are lines
    logging.basicConfig(format="%(asctime)s %(name)s %(message)s")
    interrupts.stage = "serving"
    with listening(options.host, options.port) as listener, interrupts.noted():
        Server(app, connections, interrupts).run(sockets=[listener])
        log.close()
        terminal.say("Stopped; all accepted requests were answered, all accepted events are in the log")
        interrupts.signal = 0  # it was obeyed


def main(arguments: list[str] | None = None) -> int:
    options = serve_options(__doc__, arguments)
    return guarded(lambda interrupts: work(options, interrupts), options.quiet)


if __name__ == "__main__":
    explain_faults()
    sys.exit(main())
