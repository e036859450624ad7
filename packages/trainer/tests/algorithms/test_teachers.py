"""On-policy distillation with several teachers: whose a sequence is, what each says of its own, and a policy that learns of all."""

from dataclasses import replace

import pytest
import torch

from made_groups import made_group
from offbeat_engine import Fsdp2Config, ModelConfig, OptimizerConfig, World, engine_class
from offbeat_engine.testing import make_tiny_model, random_batch
from offbeat_trainer import Distill, DistillConfig, Role, StepShape, reduce_metrics
from offbeat_trainer.algorithms import distill
from offbeat_trainer.algorithms.roles import role_engines
from offbeat_trainer.algorithms.trial import trial
from offbeat_trainer.config import Divergence
from offbeat_trainer.data.assemble import assemble

TEACHERS = {"sums": "b", "words": "c", "more words": "c"}
SEVERAL = Distill(config=DistillConfig(teacher_path="a", teachers=TEACHERS))


def test_a_teacher_of_several_domains_is_one_role():
    roles = SEVERAL.roles()
    assert {name: (one.path, one.trained) for name, one in roles.items()} == {
        "policy": ("", True),
        "teacher": ("a", False),
        "teacher_1": ("b", False),
        "teacher_2": ("c", False),
    }
    whole = replace(SEVERAL, config=replace(SEVERAL.config, divergence=Divergence.JSD)).roles()
    assert all(one.names_tokens for one in whole.values())
    assert not any(one.names_tokens for one in roles.values())
    assert trial(SEVERAL)


def test_a_sequence_is_of_the_teacher_of_its_prompts_domain_or_of_the_first():
    domains = ["words", None, "sums", "verse", "more words"]
    groups = [
        made_group(str(n), (1.0, 0.0), data={"domain": domain} if domain else {})
        for n, domain in enumerate(domains)
    ]
    batch = assemble(groups, SEVERAL.targets(groups), temperature=1.0)
    assert batch["distill/teacher"].tolist() == [2, 2, 0, 0, 1, 1, 0, 0, 2, 2]
    alone = Distill(config=DistillConfig(teacher_path="a", teachers={"sums": "a"}))
    assert alone.targets(groups) == {}


def test_a_domain_without_a_folder_is_refused():
    config = replace(SEVERAL.config, teachers={"sums": "", "words": "c"})
    [refusal] = Distill(config=config).check()
    assert (refusal.setting, refusal.reason) == ("algorithm.teachers", "names no folder for sums")
    assert SEVERAL.check() == []


class Watching(Role):
    """Keeps what it was trained on, and how many tokens it was asked of."""

    asked = 0

    def train(self, shares, loss_fn):
        self.seen = [share.clone() for share in shares]
        return super().train(shares, loss_fn)

    def judge(self, shares, key):
        self.asked += sum(int(share["loss_mask"].sum()) for share in shares)
        super().judge(shares, key)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return the roles of a policy and two teachers, and their algorithm, by a divergence."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("models")
    paths = [make_tiny_model(folder / str(seed), seed=seed) for seed in range(3)]

    def of(kind, updates=1):
        config = DistillConfig(teacher_path=paths[1], teachers={"words": paths[2]}, divergence=kind, top_k=16)
        algorithm = Distill(config=config, step=StepShape(updates_per_step=updates))
        settings = Fsdp2Config(model=ModelConfig(path=paths[0]), optimizer=OptimizerConfig(lr=3e-3))
        roles = {}
        for name, one in role_engines(algorithm.roles(), settings, infers_alone=True).items():
            engine = engine_class("fsdp2")(one, World())
            engine.init_model()
            roles[name] = Watching(engine)
        return algorithm, roles

    return of


def batch_of(whose, seed=0):
    batch = random_batch(len(whose), seed=seed)
    batch["loss_mask"][1] = False
    batch["distill/teacher"] = torch.tensor(whose)
    return batch


@pytest.mark.parametrize("kind", [Divergence.SAMPLED, Divergence.FORWARD_KL])
def test_each_sequence_has_the_log_probs_of_its_own_teacher_who_reads_no_other(made, kind):
    """The second mini-batch has no sequence of the first teacher."""
    algorithm, roles = made(kind, updates=2)
    batch = batch_of([0, 1, 1, 0, 1, 1, 1, 1])
    algorithm.learn(roles, batch)
    mask, parts, num = batch["loss_mask"], roles["policy"].seen, 0
    assert [len(part) for part in parts] == [4, 4]
    for whose, name in enumerate(("teacher", "teacher_1")):
        alone = [part.exclude("old_logprobs") for part in parts]
        key = distill.TAUGHT.key if kind is Divergence.SAMPLED else distill.TOP.key
        for part in alone:
            before, ids = part[key].clone(), part.get("top_ids", None)
            if kind is Divergence.SAMPLED:
                Role.judge(roles[name], [part], key)
            else:
                roles[name].judge_top([part], key, 16)
                assert part["top_ids"].shape == ids.shape
            own = part["loss_mask"] & (part["distill/teacher"] == whose)[:, None]
            other = part["loss_mask"] & ~own
            torch.testing.assert_close(before[own], part[key][own], atol=1e-5, rtol=0)
            assert not other.any() or (before[other] - part[key][other]).abs().max() > 0.01
            num += int(own.sum())
    assert num == int(mask.sum())
    if kind is Divergence.SAMPLED:
        assert sum(roles[name].asked for name in ("teacher", "teacher_1")) == num
    for role in roles.values():
        role.engine.close()


def test_a_policy_becomes_each_domains_teacher(made):
    algorithm, roles = made(Divergence.REVERSE_KL)
    whose = [0, 0, 1, 1, 0, 1, 0, 1]
    said = [
        reduce_metrics(algorithm.learn(roles, batch_of(whose)))["distill/divergence_nats"] for _ in range(30)
    ]
    assert said[-1] < 0.35 * said[0]
    turned = batch_of([1 - one for one in whose])
    assert reduce_metrics(algorithm.learn(roles, turned))["distill/divergence_nats"] > 2 * said[-1]
    for role in roles.values():
        role.engine.close()
