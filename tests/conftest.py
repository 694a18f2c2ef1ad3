"""What every test gets: the same generated inputs in every run."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# Tests share a machine with their own workers and compile kernels at a first call: a deadline per
# example would measure that. Derandomised, so that a red test stays red until it is mended.
settings.register_profile(
    "streampack",
    deadline=None,
    derandomize=True,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("streampack")
