"""An algorithm's state, its baseline and roles that take weights over: carried, saved, resumed, and the same wherever they are read."""

import pickle
from dataclasses import replace

import pytest
import torch

from offbeat_engine import Fsdp2Config, ModelConfig, OptimizerConfig, StateError, World, engine_class
from offbeat_engine.testing import make_tiny_model, random_batch
from offbeat_rollout import Completion, Finish, SamplingParams
from offbeat_trainer import GrpoConfig, Learner, LoopConfig, Role, RoleSpec
from offbeat_trainer.algorithms.grpo import REFERENCE, Grpo
from offbeat_trainer.algorithms.roles import POLICY
from offbeat_trainer.data.loading import load_object
from offbeat_trainer.data.types import UNSCORED, Group, Prompt, Score, Trajectory
from offbeat_trainer.errors import GroupFailed
from offbeat_trainer.loops.events import Finished
from offbeat_trainer.loops.journal import from_row, to_row
from offbeat_trainer.rollouts.single import WithBaseline
from scripted import ScriptedRun, run_virtual

FILE = """
from offbeat_trainer.algorithms.grpo import Grpo

class Counting(Grpo):
    def next_state(self, metrics):
        return {"steps": self.state.get("steps", 0) + 1}
"""


def test_a_state_follows_the_metrics_and_travels_with_an_algorithm_of_a_file(tmp_path):
    (tmp_path / "counting.py").write_text(FILE)
    cls = load_object(f"{tmp_path}/counting.py:Counting")
    first = cls(config=GrpoConfig())
    third = first.after({}).after({"train/loss": 1.0})
    assert (first.state, third.state) == ({}, {"steps": 2})
    assert pickle.loads(pickle.dumps(third)).state == {"steps": 2}
    assert Grpo(config=GrpoConfig()).after({"train/loss": 1.0}) == Grpo(config=GrpoConfig())


class Counting(Grpo):
    """Counts steps, and adds the gradient norm of each up."""

    def next_state(self, metrics):
        before = self.state or {"steps": 0, "norms": 0.0}
        return {"steps": before["steps"] + 1, "norms": before["norms"] + metrics["train/grad_norm"]}


@pytest.mark.parametrize("mode", ["sync", "one_step_off", "fully_async"])
def test_a_state_goes_on_where_a_run_does(tmp_path, mode):
    loop = LoopConfig(
        steps=5, prompts_per_step=3, group_size=2, validate_every=0, validation_prompts=1, save_every=1, sample_every=0
    )  # fmt: skip

    def run_of(folder, steps):
        algorithm = Counting(config=GrpoConfig())
        return ScriptedRun(
            folder=tmp_path / folder, mode=mode, loop=replace(loop, steps=steps), algorithm=algorithm
        ).go()

    whole = run_of("whole", 5).policy.states
    assert whole[0] == {}
    assert [state["steps"] for state in whole[1:]] == [1, 2, 3, 4]
    assert whole[4]["norms"] > whole[1]["norms"] > 0
    first, then = run_of("cut", 2).policy.states, run_of("cut", 5).policy.states
    assert [state.get("steps", 0) for state in (*first, *then)] == [0, 1, 2, 3, 4]
    assert then[0]["norms"] > first[1]["norms"]


class Alone:
    """A rollout that gives each completion its temperature as its reward, or none."""

    def __init__(self, unscored=()):
        self.asked, self._unscored = [], unscored

    async def run(self, prompt, sampling, n, begun=(), keep=None):
        self.asked.append((sampling, n, begun))
        made = Completion.of(
            request_id="r", token_ids=[1], logprobs=[-1.0], policy_versions=[1], finish=Finish.STOP
        )
        score = UNSCORED if sampling.temperature in self._unscored else Score(reward=sampling.temperature)
        return Group(prompt=prompt, trajectories=(Trajectory.of(made),) * n, scores=(score,) * n)

    async def interrupt(self): ...

    def go_on(self): ...

    async def close(self): ...


def test_a_baseline_is_drawn_beside_the_group_and_only_its_score_is_kept():
    inner, prompt = Alone(), Prompt(uid="p", text="", token_ids=(1,))
    rollout = WithBaseline(inner, {"temperature": 0.0})
    params = SamplingParams(max_tokens=4, temperature=0.8, seed=3)
    group = run_virtual(rollout.run(prompt, params, 3, ("begun",)))
    assert [score.reward for score in group.scores] == [0.8] * 3
    assert [score.reward for score in group.baseline] == [0.0]
    assert inner.asked == [(params, 3, ("begun",)), (replace(params, temperature=0.0), 1, ())]
    with pytest.raises(GroupFailed, match="the baseline of prompt 'p' has no score"):
        run_virtual(WithBaseline(Alone(unscored=(0.0,)), {"temperature": 0.0}).run(prompt, params, 3))
    finished = Finished(
        index=4, version=2, trajectories=group.trajectories, scores=group.scores, baseline=group.baseline
    )
    assert from_row(to_row(finished)) == finished


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    torch.set_num_threads(1)
    return str(make_tiny_model(tmp_path_factory.mktemp("model") / "tiny"))


class FollowedReference(Grpo):
    """GRPO whose reference is set to the policy after every second step."""

    def roles(self):
        return {POLICY: RoleSpec(trained=True), REFERENCE: RoleSpec(trained=True)}

    def learn(self, roles, batch):
        metrics = super().learn(roles, batch)
        if roles[POLICY].step % 2:
            roles[REFERENCE].take_weights(roles[POLICY])
        return metrics


def learner_of(model, folder):
    def engine():
        made = engine_class("fsdp2")(
            Fsdp2Config(model=ModelConfig(path=model), optimizer=OptimizerConfig(lr=3e-3)), World()
        )
        made.init_model()
        return made

    algorithm = FollowedReference(config=GrpoConfig(kl_coef=0.1))
    roles = {name: Role(engine()) for name in algorithm.roles()}
    return Learner(algorithm, roles, checkpoints=str(folder), keep=2)


def test_a_reference_that_is_reset_is_reset_again_after_a_resume(model, tmp_path):
    batch = random_batch(6)
    batch["advantages"] = torch.where(batch["loss_mask"], torch.linspace(-1, 1, 6)[:, None], 0.0)
    whole = learner_of(model, tmp_path / "whole")
    before = whole.logprobs(batch, REFERENCE)
    apart = []
    for step in range(4):
        whole.update(batch)
        apart.append(bool((whole.logprobs(batch, REFERENCE) - whole.logprobs(batch)).any()))
        if step == 2:
            whole.save(3, block=True)
    assert apart == [True, False, True, False]
    assert not torch.equal(whole.logprobs(batch, REFERENCE), before)
    resumed = learner_of(model, tmp_path / "whole")
    assert resumed.load(None) == 3
    assert torch.any(resumed.logprobs(batch, REFERENCE) != resumed.logprobs(batch))
    resumed.update(batch)
    assert torch.equal(resumed.logprobs(batch, REFERENCE), whole.logprobs(batch, REFERENCE))
    whole.close()
    resumed.close()


def test_weights_are_taken_from_an_engine_of_the_same_kind_alone(model, tmp_path):
    learner = learner_of(model, tmp_path)
    with pytest.raises(ValueError, match=r"`keep` must lie in 0\.\.1, got 2"):
        learner.policy.take_weights(learner.policy, keep=2)
    with pytest.raises(StateError, match="from another Fsdp2Engine, not from str"):
        learner.policy.take_weights("policy")
    learner.close()
