"""An environment of one's own: `offbeat train task=file environment.path=examples/calculator.py:Calculator ...`.

The data has a column `answer`. The policy asks by a turn like `47*86+29`, and answers by one that begins with `:`. As coroutines,
as those of a calculator behind a network would be.
"""

import ast
import operator

from offbeat_trainer import Action, Feedback, Prompt

OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def worked_out(text: str) -> int:
    """Return the value of sums, differences and products of whole numbers; ValueError or SyntaxError for anything else."""

    def value(node: ast.expr) -> int:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
            return OPERATIONS[type(node.op)](value(node.left), value(node.right))
        raise ValueError(f"not to be worked out: {text!r}")

    return value(ast.parse(text, mode="eval").body)


class Calculator:
    """Shows what it is asked for in four digits; a right answer earns 1, and each question costs a hundredth."""

    async def reset(self, prompt: Prompt, seed: int) -> str:
        """Begin with a prompt; there is nothing to say before the first question."""
        del seed
        self.answer = int(str(prompt.data["answer"]))
        return ""

    async def step(self, action: Action) -> Feedback:
        """Show a result, or say what an answer is worth."""
        if action.text.startswith(":"):
            right = action.text[1:].isdecimal() and int(action.text[1:]) == self.answer
            return Feedback(reward=float(right), correct=right, done=True, parts={"answer": float(right)})
        try:
            shown = f"{worked_out(action.text) % 10_000:04}"
        except (ValueError, SyntaxError):
            shown = "????"
        return Feedback(observation=f"{shown};", reward=-0.01, parts={"questions": 1.0})
