"""Run, track and report federated experiments."""

import os

# OpenMP's threads wait for work spinning: next to other busy processes (workers, another run) every parallel region
# of torch then waits for a thread that has been put aside. Read when torch is loaded, so it is set before.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
