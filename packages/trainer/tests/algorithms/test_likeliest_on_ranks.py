"""What asks for likeliest or kept tokens learns the same on two ranks as on one: several teachers, OTB, truncated sampling."""

from dataclasses import replace

import pytest
import torch

from made_groups import made_group
from offbeat_engine import Fsdp2Config, ModelConfig, OptimizerConfig, engine_class
from offbeat_engine.testing import make_tiny_model, random_batch, run_ranks
from offbeat_trainer import (
    Advantage,
    Distill,
    DistillConfig,
    Grpo,
    GrpoConfig,
    Role,
    StepShape,
    reduce_metrics,
)
from offbeat_trainer.algorithms.roles import role_engines
from offbeat_trainer.config import Divergence, KlEstimator
from offbeat_trainer.data.assemble import KEPT, assemble

pytestmark = pytest.mark.spawns


def learned(world, policy, algorithm, batch):
    """Learn a step on this rank, and return what was measured, with the log-probs afterwards."""
    torch.set_num_threads(1)
    settings = Fsdp2Config(model=ModelConfig(path=policy), optimizer=OptimizerConfig(lr=1e-3))
    roles = {}
    for name, config in role_engines(algorithm.roles(), settings, infers_alone=True).items():
        engine = engine_class("fsdp2")(config, world)
        engine.init_model()
        roles[name] = Role(engine)
    metrics = reduce_metrics(algorithm.learn(roles, batch.clone()))
    after = roles["policy"].whole_logprobs(batch)
    for role in roles.values():
        role.engine.close()
    names = ("train/loss", "train/grad_norm", "mismatch/mean_abs_logprob_diff")
    return {name: metrics[name] for name in names}, after


def algorithms(folder):
    step = StepShape(updates_per_step=2)
    teachers = {"words": make_tiny_model(folder / "words", seed=2)}
    config = DistillConfig(teacher_path=make_tiny_model(folder / "sums", seed=1), teachers=teachers, top_k=16)
    whole = replace(config, divergence=Divergence.JSD)
    return {
        "sampled": Distill(config=config, step=step),
        "jsd": Distill(config=whole, step=step),
        "otb": Grpo(config=GrpoConfig(advantage=Advantage.OTB), step=step),
        "kept": Grpo(config=GrpoConfig(), step=step),
        "full": Grpo(config=GrpoConfig(kl_coef=1.0, kl_estimator=KlEstimator.FULL), step=step),
    }


@pytest.mark.parametrize("name", ["sampled", "jsd", "otb", "kept", "full"])
def test_two_ranks_learn_what_one_does(tmp_path, name):
    """With the teachers, one rank has no sequence of the first one in the second mini-batch."""
    algorithm = algorithms(tmp_path)[name]
    groups = [
        made_group(str(n), (1.0, 0.0), lengths=(3 + n, 5 - n), data={"domain": "words" if n else "sums"})
        for n in range(4)
    ]
    batch = assemble(groups, algorithm.targets(groups), temperature=1.0)
    # Equal completions would cancel, and Adam makes updates of what rounding leaves.
    batch["input_ids"] = random_batch(8, min_tokens=24, seed=1)["input_ids"][:, : batch["input_ids"].shape[1]]
    if name == "kept":
        ids = batch["input_ids"]
        kept = torch.stack((ids, (ids + 1) % 32, torch.full_like(ids, -1)), -1)
        batch[KEPT.key] = torch.where(batch["loss_mask"][..., None], kept, -1)
    policy = make_tiny_model(tmp_path / "policy", seed=0)
    (one,) = run_ranks(learned, 1, policy, algorithm, batch, timeout_s=600.0)
    for two in run_ranks(learned, 2, policy, algorithm, batch, timeout_s=600.0):
        assert two[0] == pytest.approx(one[0], rel=1e-4, abs=1e-6)
        torch.testing.assert_close(two[1], one[1], atol=1e-4, rtol=0)
