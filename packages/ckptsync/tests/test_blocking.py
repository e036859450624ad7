"""The blocking front: a plain loop and plain servers, late, dead and strange replicas, several training ranks."""

import asyncio
import json
import socket
import subprocess
import sys
import threading

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from offbeat_ckptsync import (
    NO_TRAFFIC,
    LockGate,
    ModuleSink,
    ModuleSource,
    SyncConfig,
    Syncer,
    SyncFailed,
    serve,
)
from offbeat_ckptsync.errors import SyncError, TransferError, VersionError

SECRET = "a secret of this test"


def make(seed):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(64, 48), torch.nn.LayerNorm(48), torch.nn.Linear(48, 8))


def same(one, other):
    return all(
        torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    )


def step(module, seed):
    with torch.no_grad():
        for parameter in module.parameters():
            torch.manual_seed(seed)
            parameter.add_(torch.rand_like(parameter))


@pytest.mark.parametrize("transport", ["auto", "shm", "broadcast"])
def test_a_plain_loop_brings_each_version_to_a_server_that_goes_on_serving(transport):
    trained, served, config = make(0), make(1), SyncConfig(transport=transport)
    gate, stop, answers = LockGate(), threading.Event(), []

    def answer():
        while not stop.is_set():
            with gate, torch.no_grad():
                answers.append({float(served[0].weight.sum() + served[2].bias.sum()) for _ in range(3)})

    with (
        Syncer(trained, SECRET, config) as syncer,
        serve(served, SECRET, syncer.address, name="r0", gate=gate, config=config) as replica,
    ):
        thread = threading.Thread(target=answer)
        thread.start()
        syncer.wait_for(["r0"])
        try:
            for version in (1, 2, 3):
                step(trained, version)
                report = syncer.sync(version)
                assert (report.version, [*report.members]) == (version, ["r0"])
                assert replica.version == version
                assert same(trained, served)
        finally:
            stop.set()
            thread.join()
    assert all(len(answer) == 1 for answer in answers), "a request saw two versions"


def test_one_that_comes_late_serves_what_the_others_serve_and_one_that_leaves_is_not_waited_for():
    trained, first, late = make(0), make(1), make(2)
    with Syncer(ModuleSource(trained), SECRET) as syncer:
        one = serve(ModuleSink(first), SECRET, syncer.address, name="first", gate=NO_TRAFFIC)
        syncer.wait_for(["first"])
        syncer.sync(5)
        with serve(late, SECRET, syncer.address, name="late", gate=NO_TRAFFIC) as other:
            other.wait_for(5)
            assert same(late, trained)
            one.close()
            one.close()  # harmless
            step(trained, 6)
            syncer.sync(6)
            assert (same(late, trained), same(first, trained)) == (True, False)
            assert syncer.replicas == ["late"]


def test_it_works_beside_an_event_loop_of_the_caller_and_leaves_no_thread():
    before = {*threading.enumerate()}
    trained, served = make(0), make(1)

    async def main():
        with (
            Syncer(trained, SECRET) as syncer,
            serve(served, SECRET, syncer.address, name="r0", gate=NO_TRAFFIC),
        ):
            syncer.wait_for(["r0"])
            return syncer.sync(1)

    assert asyncio.run(main()).version == 1
    assert same(trained, served)
    assert {thread.name for thread in {*threading.enumerate()} - before if "syncer" in thread.name} == set()


def test_what_cannot_be_is_said_before_anything_waits():
    with pytest.raises(ValueError, match="`secret` is empty"):
        Syncer(make(0), "")
    with pytest.raises(ValueError, match="`secret` is empty"):
        serve(make(0), "", "127.0.0.1:1", name="r0", gate=NO_TRAFFIC)
    for address in ("127.0.0.1", ":80", "host:port"):
        with pytest.raises(ValueError, match=r"`address` is what `Syncer.address` says"):
            serve(make(0), SECRET, address, name="r0", gate=NO_TRAFFIC)
    with Syncer(make(0), SECRET) as syncer:
        port = int(syncer.address.rpartition(":")[2])
        with pytest.raises(TransferError, match="in use"):
            Syncer(make(0), SECRET, port=port)
        with pytest.raises(TransferError, match=r"missing after 0.1 s: r0; here: nobody"):
            syncer.wait_for(["r0"], timeout_s=0.1)


def test_a_version_that_does_not_rise_or_weights_that_do_not_fit_change_nothing():
    trained, served, other = make(0), make(1), torch.nn.Linear(3, 3)
    with (
        Syncer(trained, SECRET) as syncer,
        serve(served, SECRET, syncer.address, name="r0", gate=NO_TRAFFIC) as replica,
    ):
        syncer.wait_for(["r0"])
        syncer.sync(2)
        with pytest.raises(VersionError):
            syncer.sync(2)
    assert same(trained, served)
    with (
        Syncer(trained, SECRET) as syncer,
        serve(other, SECRET, syncer.address, name="r1", gate=NO_TRAFFIC) as replica,
    ):
        syncer.wait_for(["r1"])
        with pytest.raises(SyncFailed, match=r"0\.weight"):
            syncer.sync(1)
        with pytest.raises(TransferError, match=r"to serve version 1 within 0.1 s and serves 0"):
            replica.wait_for(1, timeout_s=0.1)


def test_one_that_does_not_know_the_secret_is_none_of_the_replicas():
    with Syncer(make(0), SECRET) as syncer, pytest.raises(TransferError, match="with the same secret"):
        serve(make(1), "a guess", syncer.address, name="r0", gate=NO_TRAFFIC, timeout_s=2)


def train(rank, folder):
    """One of two training ranks, with weights of which each holds half; says what it sees in lines of JSON."""
    distributed.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=2)
    mesh, module = init_device_mesh("cpu", (2,)), make(0)
    for layer in (module[0], module[2]):
        layer.weight = torch.nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Shard(0)]))
    with Syncer(module, SECRET) as syncer:
        print(json.dumps(syncer.address), flush=True)
        syncer.wait_for(["r0"])
        outcomes = []
        for version in (1, 2, 2, 3):
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.mul_(1.1)
            try:
                outcomes.append(syncer.sync(version).version)
            except SyncError as error:
                outcomes.append(f"{type(error).__name__}: {error}")
        print(json.dumps([outcomes, syncer.replicas]), flush=True)
    whole = {
        name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        for name, tensor in module.state_dict().items()
    }
    torch.save(whole, f"{folder}/weights{rank}")
    distributed.destroy_process_group()


@pytest.mark.spawns
def test_several_training_ranks_gather_together_and_hear_of_what_fails(tmp_path):
    served = make(1)
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        addresses = [json.loads(rank.stdout.readline()) for rank in ranks]
        assert addresses[0] == addresses[1]
        with serve(served, SECRET, addresses[0], name="r0", gate=NO_TRAFFIC):
            done = [rank.communicate(timeout=600) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert [(rank.returncode, err) for rank, (_, err) in zip(ranks, done, strict=True)] == [(0, "")] * 2
    (said, replicas), (heard, nobody) = (json.loads(out) for out, _ in done)
    assert (replicas, nobody) == (["r0"], [])
    assert (said[:2], said[3], heard[:2], heard[3]) == ([1, 2], 3, [1, 2], 3)
    assert said[2].startswith("VersionError: ")
    assert heard[2] == f"SyncError: on rank 0: {said[2]}"
    for rank in range(2):
        weights = torch.load(tmp_path / f"weights{rank}")
        assert all(torch.equal(weights[name], tensor) for name, tensor in served.state_dict().items())


def test_a_port_may_be_chosen():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with Syncer(make(0), SECRET, port=port) as syncer:
        assert syncer.address == f"127.0.0.1:{port}"


if __name__ == "__main__":
    train(int(sys.argv[1]), sys.argv[2])
