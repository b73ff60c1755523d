"""The image every component runs in: one place for components, pipeline and infrastructure."""

from __future__ import annotations

import os

import ramen

IMAGE = os.environ.get("RAMEN_IMAGE", f"ramen-python:{ramen.__version__}")
"""Immutable by convention: KFP's cache key holds this string, so a tag must never be pushed twice. `RAMEN_IMAGE` (or
`ramen compile --image`) names another registry and tag."""
