"""Kubeflow components: one folder per stage, each a typed signature around `run_stage`."""
