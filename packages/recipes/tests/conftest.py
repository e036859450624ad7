"""What the processes of these tests agree on."""

import os

import pytest

from offbeat_recipes.cli._environment import prepare_environment


@pytest.fixture(scope="session", autouse=True)
def _one_token():
    """Let Ray, and drivers that come to it, ask for the token of this machine from the start: Ray looks once per process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "token")
        yield


@pytest.fixture(scope="module")
def shared_ray():
    """One Ray for the runs here, as on a cluster, where they come and go; return the setting that names it.

    Runs that start their own: one that is ended by Ctrl-C, and one that is started as a person starts it.
    """
    before = dict(os.environ)
    prepare_environment()  # Ray's workers have it from the Ray that starts them
    import ray

    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=256 << 20,
        log_to_driver=False,
        logging_level="ERROR",
    )
    yield f"cluster.ray_address={ray.get_runtime_context().gcs_address}"
    ray.shutdown()
    os.environ.clear()
    os.environ.update(before)
