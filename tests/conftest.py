"""Sets what must be set before jax is imported: eight host devices, no network. Also selects the
tests that run by default, without --all."""

import collections
import gc
import os
import tempfile
import zlib

os.environ.update(
    JAX_PLATFORMS="cpu",
    TPU_SKIP_MDS_QUERY="1",
    TF_CPP_MIN_LOG_LEVEL="3",
    ALLOW_MULTIPLE_LIBTPU_LOAD="true",
    HF_HUB_OFFLINE="1",
    JAX_TRACEBACK_IN_LOCATIONS_LIMIT="0",  # programs without line numbers are traced sooner
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
gc.set_threshold(50_000)  # tracing makes many objects, but almost no garbage


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="run every test, not only the fast ones")


def pytest_configure(config):
    config.addinivalue_line("markers", "full: runs only with --all")
    config.addinivalue_line("markers", "one_in(n): without --all, one in n of its cases runs")
    if "optimization_level" not in os.environ["XLA_FLAGS"]:  # most of the time is compiling:
        os.environ["XLA_FLAGS"] += " --xla_backend_optimization_level=0"  # each program runs once
        os.environ["XLA_FLAGS"] += (
            " --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"  # a third faster
        )
    if not hasattr(config, "workerinput"):  # all workers' command lines share a compilation cache
        cache = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        os.environ["XDG_CACHE_HOME"] = cache.name
        config.add_cleanup(cache.cleanup)


ALONE = ("test_slices", "test_readme")  # files whose tests share no compiled programs


def fast(items):
    """Returns the tests that run without --all. Of a test's cases, one in n runs. The first of them
    depends on the name, so tests with the same parameters run different ones: each family gets
    its share."""
    tests = collections.defaultdict(list)
    for item in items:
        if not item.get_closest_marker("full"):
            tests[item.nodeid.split("[")[0]].append(item)
    kept = set()
    for name, cases in tests.items():
        one_in = cases[0].get_closest_marker("one_in")
        n = one_in.args[0] if one_in else 1
        kept.update(cases[zlib.crc32(name.encode()) % min(n, len(cases)) :: n])
    return kept


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups afterwards
def pytest_collection_modifyitems(config, items):
    """Drops the tests that run only with --all. Keeps tests that share compiled programs on one
    worker: those of one file or, if the file has the parameter `family`, those of one family."""
    if not config.getoption("--all"):
        kept = fast(items)
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]
    for item in items:
        family = getattr(item, "callspec", None) and item.callspec.params.get("family")
        name = item.path.stem
        if name not in ALONE:
            item.add_marker(pytest.mark.xdist_group(f"{name} {family}" if family else name))


GROUP = pytest.StashKey()  # the file and the family of the previous test


@pytest.fixture(autouse=True)
def programs_are_freed(request):
    """Clears JAX's caches after each file, and after each family. Compiled programs hold memory
    maps, and a process may have only 65,530: if all programs stayed alive, XLA's compiler would
    crash."""
    family = getattr(request.node, "callspec", None) and request.node.callspec.params.get("family")
    group = (request.node.path, family)
    if group != request.config.stash.get(GROUP, None):
        request.config.stash[GROUP] = group
        jax.clear_caches()
