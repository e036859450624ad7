"""Ray reads some of its settings when it is imported: tests here import it only through these fixtures."""

import pytest

ENVIRONMENT = {
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
    "OMP_NUM_THREADS": "1",
}


@pytest.fixture(scope="module", autouse=True)
def ray_environment():
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        yield
