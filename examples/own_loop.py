"""A training loop and a loss of one's own: REINFORCE with the mean of each group as its baseline. `python examples/own_loop.py`."""

import sys

import torch

from offbeat_engine import LossOutput
from offbeat_recipes import Trainer

STEPS = 40


def reinforce(predictions, batch, scale):
    """Return -A log p, in the mean over the tokens of the batch."""
    return LossOutput(loss=-(predictions["logprobs"] * batch["advantages"]).sum() / scale.num_tokens)


def above_the_mean(groups):
    """Return for each completion how far its reward is above the mean of its group."""
    rewards = [torch.tensor([score.reward for score in group.scores]) for group in groups]
    return torch.cat([rewards_G - rewards_G.mean() for rewards_G in rewards])


trainer = Trainer(task="arithmetic", rollout="hf", run_dir=sys.argv[1] if sys.argv[1:] else "runs/own_loop")
with trainer.session() as session:
    for step in range(session.steps, STEPS):
        groups = session.sample(session.task.prompts(step, 16))
        batch = session.batch(groups, advantages=above_the_mean(groups))
        session.train(batch, reinforce)
        metrics = session.step(lr=1e-3 * (1 - step / STEPS))
        session.publish()
        print(
            f"step {session.steps}: reward {metrics['reward/mean']:.3f}, gradient {metrics['train/grad_norm']:.2f}"
        )
    session.save()
