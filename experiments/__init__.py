"""Run, track and report federated experiments."""
