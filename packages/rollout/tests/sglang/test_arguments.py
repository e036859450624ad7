"""The server's arguments: ours, those that pass through, and those that do not."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from offbeat_rollout import ConfigError, EngineStateError
from offbeat_rollout.sglang import SglangConfig, SglangEngine
from offbeat_rollout.sglang.arguments import (
    CPU_LAUNCHER,
    MARGIN,
    OURS,
    argument_names,
    cache_tokens,
    check_arguments,
    check_model,
    environment_of,
    server_command,
)
from offbeat_rollout.sglang.server import held_port
from offbeat_rollout.testing import make_tiny_model

SECRETS = Path("/run/arguments.yaml")
FIELDS = """
class ServingFields:
    model_path: A[str, "..."]
    stream_interval: A[int, "..."] = 1
    schedule_policy: A[str, "..."] = "fcfs"
    cuda_graph_bs: A[list, "..."] = None
    hicache_size: A[int, "..."] = 0
"""


@pytest.fixture
def environment(tmp_path):
    """An environment with what is read of SGLang."""
    root = tmp_path / "env" / "lib" / "python3.11" / "site-packages"
    fields = root / "sglang" / "srt" / "arg_groups" / "fields"
    fields.mkdir(parents=True)
    (fields / "serving.py").write_text(FIELDS)
    (root / "sglang" / "version.py").write_text("")
    (root / "sglang-0.5.23.dist-info").mkdir()
    (tmp_path / "env" / "bin").mkdir()
    (tmp_path / "env" / "bin" / "python").symlink_to(sys.executable)
    return tmp_path / "env"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def config(environment, model):
    return SglangConfig(model_path=model, environment=str(environment), max_model_len=100)


def test_an_environment_without_sglang_is_refused_with_what_to_do(config, tmp_path):
    with pytest.raises(ConfigError, match=r"there is no SGLang in .*nowhere.; `tools/setup sglang`"):
        check_arguments(replace(config, environment=str(tmp_path / "nowhere")))


def test_an_old_sglang_is_refused(config, environment):
    next(environment.glob("lib/*/site-packages/*.dist-info")).rename(
        environment / "lib" / "python3.11" / "site-packages" / "sglang-0.5.20.post1.dist-info"
    )
    with pytest.raises(
        ConfigError, match=r"holds SGLang 0\.5\.20; this adapter speaks to 0\.5\.23 and later"
    ):
        check_arguments(config)


def test_other_arguments_of_sglang_pass_through(config):
    more = {"schedule_policy": "lpm", "cuda_graph_bs": [1, 2], "hicache_size": 0}
    config = replace(config, server_args=more)
    SglangEngine.check(config)
    words = server_command(config, 31000, SECRETS)
    assert words[-2:] == ["--config", str(SECRETS)]
    for flag, *values in (
        ["--schedule-policy", "lpm"],
        ["--cuda-graph-bs", "1", "2"],
        ["--hicache-size", "0"],
    ):
        at = words.index(flag)
        assert words[at + 1 : at + 1 + len(values)] == values
    assert words[words.index("--context-length") + 1] == str(100 + MARGIN)
    assert "--enable-deterministic-inference" in words
    assert "--enable-deterministic-inference" not in server_command(
        replace(config, deterministic=False), 31000, SECRETS
    )


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("model_path", "`model_path` is not taken there: set `model_path`"),
        ("weight_version", "weight updates rest on it"),
        ("mem_fraction_static", "set `gpu_memory_fraction`"),
        ("schedule_polcy", "SGLang has no `schedule_polcy`; did you mean `schedule_policy`?"),
    ],
)
def test_what_is_not_taken_is_named(config, name, named):
    with pytest.raises(ConfigError) as refused:
        check_arguments(replace(config, server_args={name: 1}))
    assert named in str(refused.value)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"stop_strings": True}, "holds no tokenizer.json"),
        ({"tensor_parallel_size": 2}, "2 attention heads and 1 of keys and values, which so many devices"),
        ({"device": "cuda", "tensor_parallel_size": 4}, "`tensor_parallel_size` is 4, and the model"),
    ],
)
def test_settings_it_cannot_honour_are_refused(config, change, named):
    with pytest.raises(ConfigError, match=named):
        SglangEngine.check(replace(config, **change))


def test_on_gpus_the_server_is_sglang_s_own_with_its_fraction_of_their_memory(config, environment):
    """And nothing of what CPUs need: the launcher for them lies in the same folder."""
    (environment / "bin" / CPU_LAUNCHER).write_text("")
    gpus = replace(config, device="cuda", tensor_parallel_size=2, gpu_memory_fraction=0.5)
    SglangEngine.check(gpus)
    words = server_command(gpus, 31000, SECRETS)
    python = words.index(str(environment / "bin" / "python"))
    assert words[python + 1 : python + 3] == ["-m", "sglang.launch_server"]
    arguments = dict(pairwise(words))
    assert (arguments["--device"], arguments["--tp-size"]) == ("cuda", "2")
    assert arguments["--mem-fraction-static"] == "0.5"
    assert not [word for word in words if "CPU" in word or "sglang_cpu" in word or "OMP" in word]
    assert not {"--attention-backend", "--max-total-tokens", "--disable-overlap-schedule"} & set(words)
    on_cpu = server_command(config, 31000, SECRETS)
    assert on_cpu[on_cpu.index(str(environment / "bin" / "python")) + 1].endswith(CPU_LAUNCHER)


def test_ranks_on_a_cpu_are_given_cores(config):
    words = server_command(replace(config, tensor_parallel_size=3, cpu_threads=2), 31000, SECRETS)
    (bound,) = (word.split("=")[1] for word in words if word.startswith("SGLANG_CPU_OMP_THREADS_BIND="))
    cores = [rank.split(",") for rank in bound.split("|")]
    assert [len(of_rank) for of_rank in cores] == [2, 2, 2]
    assert {int(core) for of_rank in cores for core in of_rank} <= os.sched_getaffinity(0)
    assert not [word for word in server_command(config, 31000, SECRETS) if "OMP_THREADS_BIND" in word]


def test_a_model_shorter_than_the_context_is_refused(config):
    with pytest.raises(
        ConfigError, match=r"`max_model_len` is 513, and the model .* was made for 512 tokens"
    ):
        check_model(replace(config, max_model_len=513))


def test_two_ends_of_a_sequence_that_disagree_are_refused(config, tmp_path):
    folder = make_tiny_model(tmp_path / "model", eos_token_id=7)
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": 8}))
    with pytest.raises(ConfigError, match=r"ends sequences at \[7\], its generation_config.json at \[8\]"):
        check_model(replace(config, model_path=folder))


def test_the_cache_is_what_was_given_and_at_least_two_sequences(config):
    token_bytes = 2 * 2 * 1 * 32 * 4  # keys and values, layers, heads, width, float32
    assert cache_tokens(replace(config, kv_cache_gib=2**-10)) == 2**20 // token_bytes
    assert cache_tokens(replace(config, kv_cache_gib=1e-9)) == 2 * (100 + MARGIN)
    of_two = cache_tokens(replace(config, kv_cache_gib=2**-10, tensor_parallel_size=2))
    assert of_two == 2**20 // token_bytes, "one head of keys is on both"


def test_ours_are_arguments_of_the_installed_sglang():
    roots = list(environment_of(SglangConfig(model_path="")).glob("lib/python3.*/site-packages"))
    if not any((root / "sglang").is_dir() for root in roots):
        pytest.skip("there is no SGLang beside this environment: tools/setup sglang")
    known = argument_names(roots[0])
    assert len(known) > 200
    assert not OURS.keys() - known


@pytest.mark.spawns
async def test_an_engine_that_is_stopped_while_it_comes_up_says_so(config, environment):
    """Its server is a process that never answers."""
    python = environment / "bin" / "python"
    python.unlink()
    python.write_text("#!/bin/sh\nexec sleep 3600\n")
    python.chmod(0o755)
    engine = SglangEngine(config)
    starting = asyncio.create_task(engine.start())
    while engine._open_client is None:  # noqa: ASYNC110 nobody tells
        await asyncio.sleep(0.01)
    await engine.stop()
    with pytest.raises(EngineStateError, match=r"stopped meanwhile|ended with exit code"):
        await starting


async def test_a_port_is_kept_for_the_server_until_it_comes_up():
    with held_port() as held:
        port = held.getsockname()[1]
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", port)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert await reader.read() == b""
        writer.close()
        server.close()
