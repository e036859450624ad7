import pickle

import torch
from tensordict import TensorDict

from offbeat_engine import LossScale
from offbeat_trainer.algorithms.supervised_loss import SupervisedLoss
from offbeat_trainer.assemble import assemble_examples
from offbeat_trainer.types import Example


def test_it_is_cross_entropy_over_the_completions():
    batch = assemble_examples(
        [Example(prompt_ids=(1, 2), completion_ids=(3, 0)), Example(prompt_ids=(4,), completion_ids=(2,))]
    )
    logits_BTV = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(0))
    logprobs_BT = torch.zeros(2, 4)
    logprobs_BT[:, 1:] = (
        logits_BTV[:, :-1].log_softmax(-1).gather(-1, batch["input_ids"][:, 1:, None])[..., 0]
    )
    predictions = TensorDict({"logprobs": logprobs_BT}, batch_size=[2])
    scale = LossScale(num_tokens=3, num_sequences=2)
    parts = [SupervisedLoss()(predictions[i], batch[i], scale).loss for i in (slice(0, 1), slice(1, 2))]
    # Row 0 trains tokens 3, 0 at positions 2, 3; row 1 trains token 2 at position 1.
    targets = torch.tensor([[-100, 3, 0], [2, -100, -100]])
    wanted = torch.nn.functional.cross_entropy(logits_BTV[:, :-1].reshape(-1, 5), targets.reshape(-1))
    torch.testing.assert_close(parts[0] + parts[1], wanted)
    assert pickle.loads(pickle.dumps(SupervisedLoss())) == SupervisedLoss()
