"""`offbeat chat`: every line is answered as Transformers answers it, with and without a chat template."""

import io
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from offbeat_engine.testing import make_tiny_model
from offbeat_recipes.cli.main import main


@pytest.fixture(params=["plain_model", "chat_model"])
def run(request, tmp_path):
    """A run folder whose trained model has this tokenizer."""
    torch.set_num_threads(1)
    tokenizer = request.getfixturevalue(request.param)
    final = tmp_path / "run" / "final"
    shutil.copytree(tokenizer, final)
    make_tiny_model(tmp_path / "tiny", vocab_size=len(AutoTokenizer.from_pretrained(tokenizer)))
    for file in (tmp_path / "tiny").iterdir():
        shutil.copy(file, final)
    return tmp_path / "run"


def answer(model, tokenizer, ids):
    out = model.generate(
        torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.int64), max_new_tokens=5,
        do_sample=False, pad_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    return tokenizer.decode(out[0, len(ids) :], skip_special_tokens=True)


def test_each_line_is_answered_and_an_empty_one_begins_anew(run, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n\ntwo\n"))
    assert main(["chat", str(run), "--max-tokens", "5", "--system", "be short"]) == 0
    said = capsys.readouterr().out
    tokenizer = AutoTokenizer.from_pretrained(run / "final")
    model = AutoModelForCausalLM.from_pretrained(run / "final")
    expected, talk = [], []
    for line in ("one", "two", "", "two"):
        talk = talk or [{"role": "system", "content": "be short"}]
        if not line:
            talk = []
            continue
        talk.append({"role": "user", "content": line})
        ids = (
            tokenizer.apply_chat_template(talk, add_generation_prompt=True, return_dict=True)["input_ids"]
            if tokenizer.chat_template
            else tokenizer(line)["input_ids"]
        )
        expected.append(answer(model, tokenizer, ids))
        talk.append({"role": "assistant", "content": expected[-1]})
    assert said == "".join(f"{text}\n" for text in expected)


def test_what_is_no_model_is_said_with_what_makes_one(tmp_path, capsys):
    assert main(["chat", str(tmp_path)]) == 2
    assert f"offbeat export {tmp_path} writes a checkpoint as a model" in capsys.readouterr().err
