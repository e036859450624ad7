"""One training rank: the process around the roles."""

from __future__ import annotations

import logging
import socket
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
import torch
from torch.distributed import TCPStore

from offbeat_ckptsync.ops import SENDER_OPS, answer_blocking, failure
from offbeat_ckptsync.source.sender import Sender
from offbeat_engine import World, engine_class
from offbeat_trainer.cluster.placement import LOOPBACK, this_node
from offbeat_trainer.cluster.waits import keep_freed_memory, moves, redirect_output
from offbeat_trainer.errors import PlanRefused
from offbeat_trainer.learner import Learner
from offbeat_trainer.roles.role import POLICY, Role
from offbeat_trainer.weights.source import EngineWeights

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from offbeat_ckptsync.wire import Json
    from offbeat_engine import Engine, EngineConfig
    from offbeat_trainer.cluster.spec import TrainSpec

log = logging.getLogger(__name__)


class TrainWorker:
    """Holds the engines of one rank. Methods run one at a time, in the order the driver calls them on all ranks."""

    def __init__(self, spec: TrainSpec, rank: int, log_path: str) -> None:
        redirect_output(log_path)
        self._spec = spec
        self._rank = rank
        self._learner: Learner | None = None
        self._sender: Sender | None = None
        self._host = LOOPBACK

    def node(self) -> str:
        """Return the address of this rank's machine."""
        return this_node()

    def sees(self, path: str) -> bool:
        """Say whether a file of the driver's is there for this rank, too."""
        return Path(path).exists()

    def address(self, host: str) -> str:
        """Open the store by which the ranks meet, and keep it; return its `host:port`.

        Raises:
            PlanRefused: `host` is not this machine's.
        """
        try:
            # By itself torch's store listens on every interface, and asks nobody who they are.
            listener = socket.create_server((host, 0))
        except OSError as error:
            raise PlanRefused(
                f"cluster.rendezvous_host={host} is no address of training rank 0's machine, {this_node()} ({error}): leave "
                "it empty, or let it be one"
            ) from error
        # It holds its port from here on: `join` finds it in this process, and nobody else can take it in between.
        port, descriptor = int(listener.getsockname()[1]), listener.detach()
        self._meeting = TCPStore(
            host, port, is_master=True, wait_for_workers=False, multi_tenant=True, master_listen_fd=descriptor
        )
        return f"{host}:{port}"

    def join(self, store_address: str, threads: Sequence[int]) -> None:
        """Meet the other ranks. Called in the thread that computes, whose number of threads, by rank, is set here."""
        torch.set_num_threads(threads[self._rank])
        self._world = World.join(
            rank=self._rank,
            size=self._spec.num_ranks,
            store_address=store_address,
            device=self._spec.device,
            timeout_s=self._spec.collective_timeout_s,
        )

    def here(self) -> None:
        """Answer, from another thread than the one that computes."""

    def moves(self) -> bool:
        """Say, from another thread, whether this rank's work moves; see `process.moves`."""
        return moves()

    def device(self) -> str:
        """Return the id of this rank's GPU as CUDA_VISIBLE_DEVICES would name it; "" on CPU."""
        return ",".join(ray.get_runtime_context().get_accelerator_ids().get("GPU", []))

    def build(self, engines: Mapping[str, EngineConfig | None]) -> None:
        """Build the engines, in place of those of an earlier call; see `TrainGroup.build`."""
        if self._learner is not None:
            self._learner.close()
        if self._sender is not None:
            self._sender.close()
            self._sender = None
        roles = self._spec.algorithm.roles()
        built = {
            name: self._new_engine(roles[name].engine, config)
            for name, config in engines.items()
            if config is not None
        }
        self._learner = Learner(
            self._spec.algorithm,
            {
                name: Role(built[name]) if name in built else Role(built[POLICY], base=True)
                for name in engines
            },
            checkpoints=self._spec.checkpoint_dir,
            keep=self._spec.keep_checkpoints,
        )
        if self._spec.device == "cpu":
            keep_freed_memory()

    def _new_engine(self, name: str, config: EngineConfig) -> Engine:
        engine = engine_class(name or self._spec.engine_name)(config, self._world)
        engine.init_model()
        return engine

    @property
    def learner(self) -> Learner:
        """What `build` built."""
        assert self._learner is not None, "`build` comes first"
        return self._learner

    def do(self, method: str, options: Mapping[str, Any], *given: Any) -> Any:  # noqa: ANN401 - as the method has them
        """Do `method` of the learner; see `Policy`."""
        return getattr(self.learner, method)(*given, **options)

    def meet_at(self, host: str) -> None:
        """Let the members of coming syncs meet this rank at `host`."""
        if self._sender is not None and host != self._host:
            self._sender.close()  # members are elsewhere now: a replacement may start on another machine
            self._sender = None
        self._host = host

    def sync_op(self, op: str, request: Json) -> Json:
        """Do an operation of a weight sync as a rank of its source and return the outcome; see `offbeat_ckptsync.ops.SENDER_OPS`.

        `abort_send` comes also beside a `send`.
        """
        try:
            return {"ok": answer_blocking(self._sending(), SENDER_OPS, op, request)}
        except Exception as error:
            log.exception("a weight sync failed in %r", op)
            return failure(error)

    def _sending(self) -> Sender:
        if self._sender is None:
            self._sender = Sender(
                EngineWeights(self.learner.policy), replace(self._spec.sync, host=self._host)
            )
        return self._sender
