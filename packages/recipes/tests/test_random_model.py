"""A model of somebody's shape with fresh weights."""

from pathlib import Path

from safetensors.torch import load_file

from offbeat_recipes.tasks.arithmetic import ArithmeticTask
from offbeat_recipes.tasks.chars import random_model_folder
from offbeat_recipes.tasks.config import ArithmeticConfig


def test_fresh_weights_in_the_same_shape_with_the_same_tokens(tmp_path: Path):
    shape = ArithmeticTask(ArithmeticConfig(), "", seed=0).model_folder(tmp_path, 0)
    made = random_model_folder(shape, tmp_path / "a", seed=3)
    again = random_model_folder(shape, tmp_path / "b", seed=3)
    other = random_model_folder(shape, tmp_path / "b", seed=4)
    weights = [load_file(folder / "model.safetensors") for folder in (shape, made, again, other)]
    assert [{name: value.shape for name, value in one.items()} for one in weights[1:]] == 3 * [
        {name: value.shape for name, value in weights[0].items()}
    ]
    name = "model.layers.0.mlp.up_proj.weight"
    assert weights[1][name].equal(weights[2][name])
    assert not weights[1][name].equal(weights[3][name])
    assert not weights[1][name].equal(weights[0][name])
    assert (made / "tokenizer.json").read_text() == (shape / "tokenizer.json").read_text()
    assert random_model_folder(shape, tmp_path / "a", seed=3) == made
