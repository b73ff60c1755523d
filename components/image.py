"""The container image of all components."""

from __future__ import annotations

import os

import ramen

IMAGE_ENV = "RAMEN_IMAGE"
"""Names the image: when components are compiled, and in a training step, for the multi-node job that it may start."""

IMAGE = os.environ.get(IMAGE_ENV, f"ramen-python:{ramen.__version__}")
"""Never push a tag twice: KFP's cache key contains this string. `RAMEN_IMAGE` or `ramen compile --image` sets another
registry and tag."""
