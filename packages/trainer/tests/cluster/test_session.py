"""An address that is no Ray's is told at once, or after the half minute that Ray's own client takes."""

import socket
import threading

import pytest

from offbeat_trainer.config import ClusterConfig
from offbeat_trainer.errors import TrainerError


@pytest.fixture
def refused():
    from offbeat_trainer.cluster.session import start_ray

    def refused(address):
        with pytest.raises(TrainerError, match=r"check cluster\.ray_address") as caught:
            start_ray(ClusterConfig(ray_address=address), num_gpus=0)
        return str(caught.value)

    return refused


@pytest.mark.spawns
def test_a_port_at_which_nobody_listens(refused):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert "nobody is there" in refused(f"127.0.0.1:{port}")
    assert "nobody is there" in refused("no-such-host.invalid:6379")


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("silent", [True, pytest.param(False, marks=pytest.mark.deep)])
def test_somebody_who_does_not_speak_as_ray_does(refused, silent):
    with socket.create_server(("127.0.0.1", 0)) as server:

        def hang_up():
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:  # closed
                    return
                connection.close()

        if not silent:
            threading.Thread(target=hang_up, daemon=True).start()
        said = refused(f"127.0.0.1:{server.getsockname()[1]}")
        server.shutdown(socket.SHUT_RDWR)
    assert "does not answer as Ray does" in said
