"""The OpenMP wait policy, which must be set before torch is imported."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize(("user_value", "expected"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_waiting_threads_sleep_unless_user_sets_wait_policy(user_value: str | None, expected: str) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "OMP_WAIT_POLICY"}
    environment |= {"OMP_WAIT_POLICY": user_value} if user_value else {}
    code = "import ramen.encoder.model, os; print(os.environ['OMP_WAIT_POLICY'])"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == expected
