"""One contract, every engine: scripted, Transformers, and (marker vllm) vLLM in vllm/test_engine.py."""

from __future__ import annotations

import math

import pytest
import pytest_asyncio
from transformers import AutoModelForCausalLM

from offbeat_rollout import PauseMode, RolloutConfig
from offbeat_rollout.hf import HfEngine
from offbeat_rollout.testing import (
    ScriptedRollout,
    Subject,
    make_tiny_model,
    reference_logprobs,
    rollout_contract,
    write_tokenizer,
)

VOCAB = 96


SUBJECTS = ["scripted", "hf", pytest.param("hf-cuda", marks=pytest.mark.gpu(1))]


@pytest_asyncio.fixture(loop_scope="module", scope="module", params=SUBJECTS)
async def subject(request, tmp_path_factory):
    if request.param == "scripted":
        engine = ScriptedRollout(RolloutConfig(model_path="", max_model_len=128), vocab_size=VOCAB)
        await engine.start()
        yield Subject(
            engine=engine,
            vocab_size=VOCAB,
            logprobs=lambda prompt, tokens, sampling: [-math.log(VOCAB)] * len(tokens),
        )
    else:
        path = make_tiny_model(tmp_path_factory.mktemp("model"))
        tokenizer = write_tokenizer(path)
        device = "cuda" if request.param == "hf-cuda" else "cpu"
        config = RolloutConfig(
            model_path=path, device=device, max_model_len=256, max_num_seqs=64, stop_strings=True
        )
        engine = HfEngine(config)
        await engine.start()
        model = AutoModelForCausalLM.from_pretrained(path).eval()
        yield Subject(
            engine=engine,
            vocab_size=VOCAB,
            logprobs=lambda prompt, tokens, sampling: reference_logprobs(model, prompt, tokens, sampling),
            decode=tokenizer.decode,
        )
    await engine.stop()


@pytest.mark.parametrize("check", rollout_contract)
async def test_contract(check, subject):
    await rollout_contract[check](subject)


class Deaf(ScriptedRollout):
    """Goes on in a pause."""

    async def pause(self, mode):
        pass


class Impatient(ScriptedRollout):
    """Ends what should wait."""

    async def pause(self, mode):
        await super().pause(PauseMode.ABORT)


@pytest.mark.parametrize(
    ("planted", "says"),
    [(Deaf, "5 requests went on to their ends"), (Impatient, "a paused request must not go on")],
)
async def test_what_a_pause_does_wrong_is_said_and_nobody_after_it_finds_a_pause(planted, says):
    engine = planted(RolloutConfig(model_path="", max_model_len=32), vocab_size=VOCAB)
    await engine.start()
    subject = Subject(engine=engine, vocab_size=VOCAB, logprobs=lambda *_: [])
    with pytest.raises(AssertionError, match=says):
        await rollout_contract["pause_keep"](subject)
    assert not (await engine.health()).paused
    await engine.stop()
