"""Completions that end at a text: where it is complete, and who is refused it."""

from __future__ import annotations

import itertools
import random

import pytest

from offbeat_rollout import ConfigError, GenerateRequest, RequestError, RolloutConfig, SamplingParams
from offbeat_rollout.hf import HfEngine
from offbeat_rollout.interface import check_request
from offbeat_rollout.testing import ScriptedRollout, make_tiny_model, write_tokenizer
from offbeat_rollout.toolkit.stop_strings import StopStrings, load_tokenizer
from offbeat_rollout.vllm import VllmConfig, VllmEngine

VOCAB = 96


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = make_tiny_model(tmp_path_factory.mktemp("model"))
    write_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def tokenizer(model):
    return load_tokenizer(model)


def written(tokenizer, *texts):
    return [tokenizer.token_to_id(text) for text in texts]


def first_end(tokenizer, stop, ids):
    """Return after how many tokens one of `stop` is complete, and which."""
    watch = StopStrings(tokenizer, written(tokenizer, "a"), stop)
    for count, token in enumerate(ids, 1):
        if (found := watch.add(token)) is not None:
            return count, found
    return None


@pytest.mark.parametrize(
    ("stop", "end"),
    [
        (("ba",), (1, "ba")),
        (("ade",), (3, "ade")),  # begins inside a token, ends inside another
        (("de",), (3, "de")),
        (("no", "id", "ade"), (3, "ade")),
        (("id", "ade"), (3, "ade")),
        (("é",), (5, "é")),  # two tokens, neither of which is a character
        (("é<end>",), (6, "é<end>")),
        (("<end>z",), (7, "<end>z")),
        (("bb",), None),
        (("zz",), None),
    ],
)
def test_the_token_that_completes_a_text_is_the_last(tokenizer, stop, end):
    ids = written(tokenizer, "ba", "d", "e", "Ã", "©", "<end>", "z")
    assert first_end(tokenizer, stop, ids) == end


def test_any_text_of_any_tokens_against_the_whole_text_of_each_beginning(tokenizer):
    chance = random.Random(0)
    seen = 0
    for _ in range(300):
        ids = [chance.randrange(VOCAB) for _ in range(40)]
        whole = tokenizer.decode(ids, skip_special_tokens=False)
        starts = [chance.randrange(len(whole) - 8) for _ in range(2)]
        stop = tuple(whole[start : start + chance.randrange(1, 8)] for start in starts)
        if any("\ufffd" in one for one in stop):
            continue  # bytes that are no character yet
        seen += 1
        texts = (tokenizer.decode(ids[:count], skip_special_tokens=False) for count in itertools.count(1))
        expected = next(count for count, text in enumerate(texts, 1) if any(one in text for one in stop))
        count, found = first_end(tokenizer, stop, ids)
        assert count == expected
        assert found in tokenizer.decode(ids[:count], skip_special_tokens=False)
    assert seen > 100


def test_tokens_that_the_tokenizer_has_not_write_nothing(tokenizer):
    assert first_end(tokenizer, ("ba",), [VOCAB + 5, *written(tokenizer, "b", "a")]) == (3, "ba")


@pytest.mark.parametrize(
    ("adapter", "settings"), [(HfEngine, RolloutConfig), (VllmEngine, VllmConfig)], ids=["hf", "vllm"]
)
def test_a_folder_without_a_tokenizer_is_refused_before_anything_starts(adapter, settings, model, tmp_path):
    adapter.check(settings(model_path=model, stop_strings=True))
    bare = make_tiny_model(tmp_path)
    adapter.check(settings(model_path=bare))
    with pytest.raises(ConfigError, match=r"`stop_strings`: '.*' holds no tokenizer\.json"):
        adapter.check(settings(model_path=bare, stop_strings=True))


def test_an_adapter_that_does_not_declare_them_is_refused_by_name(model):
    with pytest.raises(
        ConfigError, match="scripted: `stop_strings`: completions cannot end at a text here: it reads"
    ):
        ScriptedRollout.check(RolloutConfig(model_path=model, stop_strings=True))


@pytest.mark.parametrize(
    ("stop", "reads", "words"),
    [
        (
            ("a",),
            False,
            r"`stop` is \('a',\), and this engine reads no tokenizer; start it with `stop_strings`",
        ),
        ("ab", True, "must be a tuple of strings that are not empty, got 'ab'"),
        (("a", ""), True, r"must be a tuple of strings that are not empty, got \('a', ''\)"),
    ],
)
def test_a_request_that_cannot_be_honoured(stop, reads, words):
    request = GenerateRequest(
        request_id="r", prompt_ids=(1,), sampling=SamplingParams(max_tokens=2, stop=stop)
    )
    with pytest.raises(RequestError, match=words):
        check_request(request, RolloutConfig(model_path="m", stop_strings=reads), VOCAB)
