# pyright: basic
"""A model folder with a tokenizer of printable characters, with and without a chat template."""

from __future__ import annotations

import string
from typing import TYPE_CHECKING

import pytest

from offbeat_recipes.tasks.chars import char_tokenizer

if TYPE_CHECKING:
    from pathlib import Path

TEMPLATE = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}[assistant]"


@pytest.fixture(scope="session")
def plain_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("plain")
    char_tokenizer(string.printable).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("chat")
    tokenizer = char_tokenizer(string.printable)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 0]}')
    return str(folder)
