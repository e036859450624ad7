from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from offbeat_ckptsync.ends.sinks import ModuleSink
from offbeat_ckptsync.errors import ManifestError

pytestmark = pytest.mark.spawns


def make_module():
    module = torch.nn.Module()
    rng = torch.Generator().manual_seed(0)
    shapes = {"column": (7, 4), "row": (4, 7), "norm": (5,), "replicated": (3, 3)}
    for name, shape in shapes.items():
        module.register_parameter(name, torch.nn.Parameter(torch.randn(*shape, generator=rng)))
    return module


def shard(module, mesh):
    for name, placement in (("column", Shard(0)), ("row", Shard(1)), ("replicated", Replicate())):
        whole = getattr(module, name).detach()
        setattr(module, name, torch.nn.Parameter(distribute_tensor(whole, mesh, [placement])))


def rank_of_three(rank, port):
    """Shard a module over three gloo ranks, load other weights whole, and return what it then holds."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=120))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
    try:
        mesh = init_device_mesh("cpu", (3,))
        module = make_module()
        shard(module, mesh)
        sink = ModuleSink(module)
        expected = sink.expected()
        fresh = {name: tensor.detach() + 1 for name, tensor in make_module().named_parameters()}
        sink.load(fresh.items(), 1)
        whole = {
            name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()
            for name, tensor in module.named_parameters()
        }
        same = all(torch.equal(whole[name], fresh[name]) for name in fresh)
        module.norm = torch.nn.Parameter(DTensor.from_local(torch.ones(5), mesh, [Partial()]))
        try:
            sink.load(fresh.items(), 2)
        except ManifestError as error:
            refused = str(error)
        else:
            refused = ""
        held = {
            name: list(tensor.to_local().shape)
            for name, tensor in module.named_parameters()
            if name in ("column", "row")
        }
        fits = expected == ModuleSink(make_module()).expected()
        return {"same": same, "held": held, "fits": fits, "refused": refused}
    finally:
        dist.destroy_process_group()


def three_ranks(port):
    """Fork three ranks off this process, which has the libraries and no thread yet; print an answer per line."""
    pipes = []
    for rank in range(3):
        ours, theirs = os.pipe()
        if os.fork() == 0:
            with os.fdopen(theirs, "w") as pipe:
                json.dump(rank_of_three(rank, port), pipe)
            os._exit(0)
        os.close(theirs)
        pipes.append(ours)
    for pipe in pipes:
        with os.fdopen(pipe) as answer:
            print(answer.read())


def test_a_module_of_distributed_tensors_takes_whole_ones_and_keeps_its_parts():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ran = subprocess.run(
        [sys.executable, __file__, str(store.port)],
        stdout=subprocess.PIPE,
        text=True,
        timeout=600,
        check=False,
    )
    answers = [json.loads(line) for line in ran.stdout.splitlines()]
    assert [answer["same"] for answer in answers] == [True] * 3
    assert [answer["fits"] for answer in answers] == [True] * 3
    assert [answer["held"] for answer in answers] == [
        {"column": [length, 4], "row": [4, length]} for length in (3, 3, 1)
    ]
    assert all("'norm' is placed as" in answer["refused"] for answer in answers)


def test_tensors_that_do_not_fit_the_rank_are_refused():
    with pytest.raises(ManifestError, match="column"):
        ModuleSink(make_module()).load([("column", torch.ones(2, 4))], 1)


if __name__ == "__main__":
    three_ranks(int(sys.argv[1]))
