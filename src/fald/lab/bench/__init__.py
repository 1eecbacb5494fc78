"""``fald bench``: the sampler beside the loops people would write themselves, on this machine.

Contenders of one workload take turns in one run, so that a busy machine slows all of them. Read the
ratios, not the times.
"""

from fald.lab.bench.runner import WORKLOADS, run

__all__ = ["WORKLOADS", "run"]
