"""Benchmarks: what the solves cost, each beside what it is compared with, in one run."""
