"""Graph-regularised encoder training for extreme classification."""

import os

__version__ = "0.1.0"

# OpenMP's threads spin while they wait for each other. Next to any other process on the same cores they spin away the
# time that the one they wait for needs: embedding takes seven times as long (docs/training.md). It is read when torch
# loads its OpenMP, so it must be set before torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
