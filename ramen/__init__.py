"""Graph-regularised encoder training for extreme classification."""

__version__ = "0.1.0"
