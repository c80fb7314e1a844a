"""Settings that must stand before jax is imported: eight host devices, and nothing from the
network."""

import os

os.environ.update(
    JAX_PLATFORMS="cpu",
    TPU_SKIP_MDS_QUERY="1",
    TF_CPP_MIN_LOG_LEVEL="3",
    ALLOW_MULTIPLE_LIBTPU_LOAD="true",
    HF_HUB_OFFLINE="1",
    XLA_FLAGS=os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8",
)

import jax
import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "tests",
    derandomize=True,  # the same examples on every run and machine
    deadline=None,  # the first example compiles
    max_examples=12,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("tests")


@pytest.fixture(autouse=True, scope="module")
def programs_are_freed():
    """A compiled program holds memory maps, of which a process may have 65,530: with those of all
    test files alive, XLA's compiler crashes."""
    yield
    jax.clear_caches()
