"""The image every component runs in: one place for components, pipeline and infrastructure."""

from __future__ import annotations

import os

import ramen

IMAGE_ENV = "RAMEN_IMAGE"
"""Names the image: here when components are compiled, and in a training step, for the job that it may start."""

IMAGE = os.environ.get(IMAGE_ENV, f"ramen-python:{ramen.__version__}")
"""Immutable by convention: KFP's cache key holds this string, so a tag must never be pushed twice. `RAMEN_IMAGE` (or
`ramen compile --image`) names another registry and tag."""
