"""The other side of the Megatron engine's bench: the loop a person would write with megatron-core alone."""

# megatron-core is untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false

from __future__ import annotations

import warnings
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from engine_loops import LR, EngineSide

from offbeat_engine import Dtype, ModelConfig, OptimizerConfig, SftLoss, World
from offbeat_engine.megatron import MegatronConfig, MegatronEngine, families
from offbeat_engine.megatron.groups import make_groups
from offbeat_engine.megatron.layers import model
from offbeat_engine.megatron.loading import hf_config

if TYPE_CHECKING:
    from collections.abc import Iterator

    from engine_loops import Size

    from offbeat_engine import TrainBatch

# B = sequences of a micro-batch, T = tokens.


def config_of(path: str, size: Size) -> MegatronConfig:
    """Return the settings of both sides."""
    return MegatronConfig(
        model=ModelConfig(path=path),
        optimizer=OptimizerConfig(lr=LR),
        dtype=Dtype(size.dtype),
        device="cuda" if size.device == "cuda" else "cpu",
        micro_batch_tokens=size.micro_batch_tokens,
        transformer_engine="auto",  # where a GPU has it, this is its first run
    )


def megatron_on(path: str, size: Size) -> EngineSide:
    """Return an initialised Megatron engine of one rank."""
    engine = MegatronEngine(config_of(path, size), World(device=size.device))
    engine.init_model()
    engine.set_loss_fn(SftLoss())
    return EngineSide(engine)


class BareMegatron:
    """megatron-core's model, schedule, wrapper and optimizer, rows of equal length, a mask: no packing, no counts, no hooks."""

    def __init__(self, path: str, size: Size) -> None:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.optimizer import OptimizerConfig as Settings
        from megatron.core.optimizer import get_megatron_optimizer

        config, found = config_of(path, size), hf_config(ModelConfig(path=path))
        self._size, self._groups = size, make_groups(config, World())
        with self._groups.lent(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ours = model.transformer_config(config, families.shape_of(found, "lm"))
            bare = GPTModel(
                config=ours,
                transformer_layer_spec=get_gpt_layer_local_spec(normalization="RMSNorm"),
                vocab_size=size.vocab,
                max_sequence_length=size.tokens,
                position_embedding_type="rope",
            )
            torch.manual_seed(0)
            for param in bare.parameters():
                torch.nn.init.normal_(param, std=0.02)
            wrapper = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
            self._model = DistributedDataParallel(config=ours, ddp_config=wrapper, module=bare)
            settings = Settings(
                optimizer="adam", lr=LR, weight_decay=0.0, clip_grad=1.0, use_distributed_optimizer=True
            )
            self._optimizer: Any = get_megatron_optimizer(
                settings, [self._model], config_overrides={}, use_gloo_process_groups=False
            )

    def step(self, batch: TrainBatch) -> None:
        """Make one optimizer step."""
        from megatron.core.distributed import finalize_model_grads
        from megatron.core.pipeline_parallel import get_forward_backward_func

        rows = self._size.micro_batch_tokens // self._size.tokens
        parts = batch["input_ids"].split(rows)
        total = int(batch["loss_mask"].sum())
        with self._groups.lent():
            self._model.zero_grad_buffer()
            self._optimizer.zero_grad()
            get_forward_backward_func()(
                forward_step_func=partial(_forward, total),
                data_iterator=iter(parts),
                model=[self._model],
                num_microbatches=len(parts),
                seq_length=self._size.tokens,
                micro_batch_size=rows,
            )
            finalize_model_grads([self._model])
            self._optimizer.step()


def _forward(total: int, parts: Iterator[torch.Tensor], bare: Any) -> tuple[torch.Tensor, Any]:  # noqa: ANN401
    ids_BT = next(parts)
    num_tokens = ids_BT.shape[1]
    hidden_1TT = torch.ones(1, 1, num_tokens, num_tokens, dtype=torch.bool).triu(1)
    position_BT = torch.arange(num_tokens).expand_as(ids_BT)
    losses_BT = bare(ids_BT, position_BT, hidden_1TT, labels=ids_BT.roll(-1, 1))
    loss = losses_BT[:, :-1].sum() / total
    return loss, _undivided


def _undivided(loss: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    return loss, torch.zeros((), dtype=torch.int), {}
