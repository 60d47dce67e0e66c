"""The campaign of hostile inputs: valid, malformed and malicious ones, interrupted runs, damaged files.

    python -m tests.hostile [AREA ...] [--only TEXT] [--jobs 2]    everything, some ten minutes on two cores
    python -m tests.hostile --short                                what `make test-slow` runs; `make test` a fifth of it

Each case runs in a process of its own and must end as its line in a table says: with one clear error or working, never
with a traceback, never for ever, never with anything lost. A new case is one line in the table of its area. What is
accepted on purpose, though it looks wrong, stands in accepted.py with the reason.
"""
