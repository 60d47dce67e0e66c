"""Test valid, malformed and malicious inputs, interrupted runs and damaged files.

    python -m tests.hostile [AREA ...] [--only TEXT] [--jobs 2]    all cases, some ten minutes on two cores
    python -m tests.hostile --short     those of `make test-slow`; `make test` runs a sample of them

Each case runs in a separate process and must end as its line in a table requires: with one clear error, or by working;
never with a traceback, a hang or a lost file. A new case is one line in the table of its area. accepted.py lists wrong
inputs that are accepted on purpose, with the reasons.
"""
