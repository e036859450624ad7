"""Experts that a sampler recorded, on their way from completions into a batch: by hand, with L = 2 layers and K = 2."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from offbeat_engine import BatchError, Fsdp2Config, ModelConfig, World, check_batch, engine_class
from offbeat_engine.testing import make_tiny_model, random_batch
from offbeat_rollout import Completion, Finish, SamplingParams
from offbeat_trainer.algorithms.grpo import REFERENCE, Grpo
from offbeat_trainer.algorithms.learner import Learner
from offbeat_trainer.algorithms.roles import POLICY, Role, predict_values
from offbeat_trainer.config import EnvironmentConfig, GrpoConfig
from offbeat_trainer.data.assemble import assemble
from offbeat_trainer.data.types import Group, Prompt, Trajectory
from offbeat_trainer.errors import TrainerError
from offbeat_trainer.loops.journal import pack, unpack
from offbeat_trainer.rollouts.environment import Feedback
from offbeat_trainer.rollouts.multi import EnvironmentSetup, MultiTurn
from offbeat_trainer.rollouts.single import GroupGenerator
from scripted import run_virtual

PROMPT = Prompt(uid="p", text="", token_ids=(1, 2))
SAMPLING = SamplingParams(max_tokens=4, seed=5)


def routed(tokens, call):
    """Return what routers may have said of `tokens` in a call: another answer for each token, and in each call."""
    own = [[[100 * call + token, 1], [token, 2]] for token in tokens]
    return np.array(own, np.int16).reshape(-1, 2, 2)


def completion(prompt, tokens, call=0, finish=Finish.STOP):
    made = Completion.of(
        request_id="r",
        token_ids=tokens,
        logprobs=[-1.0] * len(tokens),
        policy_versions=[3] * len(tokens),
        finish=finish,
    )
    return (
        replace(made, routed_experts=routed([*prompt, *tokens][:-1], call)) if tokens and call >= 0 else made
    )


class Replica:
    """Answers with `answers`, one after the other, each by routers that answer otherwise than before."""

    def __init__(self, *answers):
        self.asked, self._answers = [], answers

    async def generate_many(self, requests):
        made = []
        for request in requests:
            tokens, finish = self._answers[len(self.asked)]
            call = len(self.asked)
            self.asked.append(request)
            made.append(completion(request.prompt_ids, tokens, call, finish))
        return [
            replace(one, request_id=request.request_id) for one, request in zip(made, requests, strict=True)
        ]

    async def abort(self, request_ids):
        """Its answers say themselves what was aborted."""


class Asking:
    """Says 8 first, then 9, and ends after `turns`."""

    def __init__(self, turns):
        self.turns = turns

    def reset(self, prompt, seed):
        return [8]

    async def step(self, action):
        return Feedback(observation=[9], reward=0.0, done=action.turn + 1 == self.turns)


def talk(replica, turns):
    setup = EnvironmentSetup(
        make=lambda: Asking(turns), decode=lambda ids: "", encode=lambda said, last: list(said)
    )
    multi = MultiTurn(GroupGenerator(replica.generate_many, replica.abort), setup, EnvironmentConfig())
    return run_virtual(multi.run(PROMPT, SAMPLING, 1))


def batch_of(*trajectories):
    group = Group(prompt=PROMPT, trajectories=trajectories)
    batch = assemble([group], {}, temperature=1.0)
    check_batch(batch)
    return batch


def test_a_batch_has_them_for_every_token_but_the_last_one():
    batch = batch_of(
        Trajectory.of(completion((1, 2), (7, 8, 0))),
        Trajectory.of(completion((1, 2), (7,), call=1)),
        Trajectory.of(completion((1, 2), (), finish=Finish.ABORT)),
    )
    none = [-1] * 4
    assert batch["routed_experts"].dtype == torch.int16
    assert batch["routed_experts"].tolist() == [
        [[1, 1, 1, 2], [2, 1, 2, 2], [7, 1, 7, 2], [8, 1, 8, 2], none],
        [[101, 1, 1, 2], [102, 1, 2, 2], none, none, none],
        [none] * 5,
    ]
    assert "routed_experts" not in batch_of(Trajectory.of(completion((1, 2), (7, 8, 0), call=-1)))


def test_what_does_not_fit_its_tokens_is_refused():
    long = replace(completion((1, 2), (7, 8)), routed_experts=routed([1, 2, 7, 8], 0))
    with pytest.raises(TrainerError, match="row 0 of the batch has 4 tokens and experts of 4"):
        batch_of(Trajectory.of(long))
    wide = replace(completion((1, 2), (7, 8)), routed_experts=np.zeros((3, 3, 2), np.int16))
    with pytest.raises(TrainerError, match=r"several shapes .*\(2, 2\), \(3, 2\)"):
        batch_of(Trajectory.of(completion((1, 2), (7, 8))), Trajectory.of(wide))


def test_each_turn_has_those_by_which_it_was_sampled():
    replica = Replica(((7, 0), Finish.STOP), ((5, 6, 0), Finish.STOP), ((4,), Finish.STOP))
    [one] = talk(replica, 3).trajectories
    assert one.token_ids.tolist() == [8, 7, 0, 9, 5, 6, 0, 9, 4]
    # 1 2 8 7 | 0 9 5 6 | 0 9: the last token of a turn was fed with the next one.
    firsts = [1, 2, 8, 7, 100, 109, 105, 106, 200, 209]
    assert one.rows[0].routed_experts[:, 0, 0].tolist() == firsts
    assert batch_of(one)["routed_experts"][0, :, 0].tolist() == [*firsts, -1]
    kept = [len(turn.completion.routed_experts) for turn in one.turns]
    assert kept == [4, 4, 2], "no turn keeps its prompt's, which the turns before have"
    assert all(turn.completion.routed_experts.base is None for turn in one.turns[1:])


def test_a_turn_without_tokens_takes_nothing_from_those_before_it():
    [one] = talk(Replica(((7, 0), Finish.STOP), ((), Finish.LENGTH)), 3).trajectories
    assert one.token_ids.tolist() == [8, 7, 0, 9]
    assert one.rows[0].routed_experts[:, 0, 0].tolist() == [1, 2, 8, 7]
    assert batch_of(one)["routed_experts"][0, :, 0].tolist() == [1, 2, 8, 7, -1, -1]


@pytest.mark.parametrize(
    ("answers", "firsts"),
    [
        # Aborted before its first token, then after one, then before its next: the rest is asked for anew each time.
        ([(), (5,), (), (6, 0)], [101, 102, 305, 306]),
        ([(5,), (6, 0)], [1, 2, 105, 106]),
        ([(5, 6), ()], [1, 2, 5]),
    ],
)
def test_completions_that_are_continued_keep_those_by_which_they_were_sampled(answers, firsts):
    *some, last = answers
    replica = Replica(*((tokens, Finish.ABORT) for tokens in some), (last, Finish.LENGTH))
    generator = GroupGenerator(replica.generate_many, replica.abort)
    group = run_virtual(generator.complete(PROMPT, SAMPLING, 1))
    assert len(replica.asked) == len(answers)
    tokens = group.trajectories[0].token_ids.tolist()
    expected = [100 * (firsts[n] // 100) + token for n, token in enumerate([1, 2, *tokens][:-1])]
    assert group.trajectories[0].rows[0].routed_experts[:, 0, 0].tolist() == expected == firsts


def test_a_journal_gives_them_back_and_says_that_it_holds_them():
    [turns] = talk(Replica(((7, 0), Finish.STOP), ((5, 6, 0), Finish.STOP)), 2).trajectories
    whole = (
        turns,
        Trajectory.of(completion((1, 2), (), finish=Finish.ABORT)),
        Trajectory.of(completion((1, 2), (7, 8, 0), call=1)),
        Trajectory.of(completion((1, 2), (7, 8, 0), call=-1)),
    )
    body = pack(whole)
    back = unpack(body)
    assert back == whole
    assert back[2].rows[0].routed_experts.dtype == np.int16
    assert [one.rows[0].routed_experts is None for one in back] == [False, True, False, True]
    assert not back[2].rows[0].routed_experts.flags.writeable
    assert json.loads(body.partition(b"\n")[0])["format"] == 3, "an older version says that it is too old"
    plain = pack(whole[3:])
    assert json.loads(plain.partition(b"\n")[0])["format"] == 2


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    torch.set_num_threads(1)
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def engine(model, head="lm"):
    made = engine_class("fsdp2")(Fsdp2Config(model=ModelConfig(path=model, head=head)), World())
    made.init_model()
    return made


def test_only_the_policy_replays_them(model):
    """An engine that cannot replay refuses a batch that has them, so it is seen who is given them."""
    batch = random_batch(3)
    batch["routed_experts"] = torch.zeros(*batch["input_ids"].shape, 4, dtype=torch.int16)
    policy, judge = Role(engine(model)), Role(engine(model))
    learner = Learner(Grpo(config=GrpoConfig()), {POLICY: policy, REFERENCE: judge}, checkpoints="", keep=1)
    assert (policy.replays, judge.replays) == (True, False)
    share = batch.copy()
    judge.judge([share], "ref_logprobs")
    assert share["ref_logprobs"].abs().sum() > 0
    assert torch.equal(judge.whole_logprobs(batch), judge.whole_logprobs(batch.exclude("routed_experts")))
    assert predict_values(engine(model, head="value"), batch).shape == batch["loss_mask"].shape
    for call in (
        lambda: policy.judge([share], "old_logprobs"),
        lambda: policy.whole_logprobs(batch),
        lambda: learner.supervise(batch),
    ):
        with pytest.raises(BatchError, match="routed_experts"):
            call()
    assert "routed_experts" in batch
