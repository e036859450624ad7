"""Written rows, random predictions of them, and short training of an algorithm on a real engine of one rank."""

# pyright: basic

import numpy as np
import torch
from tensordict import TensorDict

from offbeat_engine import Fsdp2Config, LossScale, ModelConfig, OptimizerConfig, World, engine_class
from offbeat_trainer import Pair, Role, StepShape, reduce_metrics
from offbeat_trainer.algorithms.roles import role_engines


def tokens(draw, most=7):
    length = int(torch.randint(1, most + 1, (1,), generator=draw))
    return tuple(torch.randint(3, 60, (length,), generator=draw).tolist())


def pairs(count, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return [
        Pair(prompt_ids=(1, *tokens(draw, 4)), chosen_ids=tokens(draw), rejected_ids=tokens(draw))
        for _ in range(count)
    ]


def masked(batch, seed=0):
    """Take some tokens out of the mask of `batch`, and all of its third row; add policy and reference log-probs in float64."""
    draw = torch.Generator().manual_seed(seed)
    mask_BT = batch["loss_mask"] & (torch.rand(batch["loss_mask"].shape, generator=draw) < 0.8)
    mask_BT[2] = False
    batch["loss_mask"] = mask_BT
    policy_BT, ref_BT = (
        -2 * torch.rand(mask_BT.shape, generator=draw, dtype=torch.float64) for _ in range(2)
    )
    batch["ref_logprobs"] = ref_BT
    return batch, policy_BT


def counts(batch):
    mask_BT = batch["loss_mask"]
    units = set(batch["unit"].tolist()) if "unit" in batch else range(len(mask_BT))
    return LossScale(num_tokens=int(mask_BT.sum()), num_sequences=len(mask_BT), num_units=len(units))


def call(loss_fn, policy_BT, batch, scale=None, key="logprobs"):
    predictions = TensorDict({key: policy_BT}, batch_size=[len(policy_BT)])
    return loss_fn(predictions, batch, counts(batch) if scale is None else scale)


def cuts(batch):
    """Return ways to cut `batch` into micro-batches of whole units, in other orders too."""
    num = len(batch["loss_mask"])
    units = batch["unit"] if "unit" in batch else torch.arange(num)
    order = torch.randperm(num, generator=torch.Generator().manual_seed(3))
    first = torch.isin(units, units[:4])
    return [[order], [(first).nonzero()[:, 0], (~first).nonzero()[:, 0].flip(0)]]


def padded(batch, policy_BT, columns=3):
    """Return both with columns of junk on the right, which no mask covers."""
    wide = batch.copy()
    for key in ("input_ids", "loss_mask", "ref_logprobs"):
        junk = torch.full((len(policy_BT), columns), 0 if key != "ref_logprobs" else -9.0).to(
            batch[key].dtype
        )
        wide[key] = torch.cat((batch[key], junk), 1)
    return wide, torch.nn.functional.pad(policy_BT, (0, columns), value=float("-inf"))


def differences(value, policy_BT, step=1e-6):
    """Return the gradient of `value`, a function of a NumPy array, at `policy_BT` by central differences."""
    at, grad = policy_BT.numpy(), np.zeros(policy_BT.shape)
    for place in np.ndindex(*at.shape):
        moved = np.zeros_like(at)
        moved[place] = step
        grad[place] = (value(at + moved) - value(at - moved)) / (2 * step)
    return torch.from_numpy(grad)


def learned(algorithm, path, batch, *, steps=12, lr=1e-3):
    """Return what is said of `batch` before, in each step, and after, as metrics, and the roles."""
    told = Fsdp2Config(model=ModelConfig(path=path), optimizer=OptimizerConfig(lr=lr))
    roles = {}
    for name, config in role_engines(algorithm.roles(), told, infers_alone=True, generates=False).items():
        assert config is not None
        engine = engine_class("fsdp2")(config, World())
        engine.init_model()
        roles[name] = Role(engine)
    said = [reduce_metrics(algorithm.evaluate(roles, batch))]
    said += [reduce_metrics(algorithm.learn(roles, batch)) for _ in range(steps)]
    said.append(reduce_metrics(algorithm.evaluate(roles, batch)))
    return said, roles


def shape(updates=1):
    return StepShape(updates_per_step=updates)
