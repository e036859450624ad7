"""What is looked up before a plan is made."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from offbeat_recipes.cli._hydra import compose_run
from offbeat_recipes.errors import SettingError
from offbeat_recipes.planning.facts import Facts, gather_facts
from offbeat_recipes.planning.plan import plan_run
from offbeat_recipes.tasks.base import make_task
from offbeat_recipes.tasks.config import ArithmeticConfig


def _refused(facts: Facts) -> dict[str, str]:
    return {item.setting: item.reason for item in facts.refusals}


def test_the_tiny_model_is_counted_without_being_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from transformers import AutoModelForCausalLM

    monkeypatch.chdir(tmp_path)
    config = compose_run([])
    facts = gather_facts(config)
    assert list(tmp_path.iterdir()) == []
    assert facts.model is not None
    folder = make_task(config.task, "", 0).model_folder(tmp_path, 0)
    real = AutoModelForCausalLM.from_pretrained(folder)
    assert facts.model.num_params == sum(parameter.numel() for parameter in real.parameters())
    assert (facts.model.num_layers, facts.model.vocab_size) == (2, 20)
    assert facts.max_prompt_tokens == 6
    named = gather_facts(compose_run([f"model.path={folder}"]))
    assert named.model == facts.model
    assert facts.refusals == named.refusals == ()


def test_a_driver_without_a_gpu_plans_for_a_cluster_that_has_them(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    config = compose_run(
        ["device=cuda", "model.dtype=bfloat16", "cluster.ray_address=head:6379", "engine.compile=true"]
    )
    facts = gather_facts(config)
    assert facts.refusals == ()
    assert plan_run(config, facts).refusals == ()


def test_a_gpu_of_the_driver_is_not_taken_for_one_of_the_cluster(monkeypatch: pytest.MonkeyPatch):
    def asked(*_: object) -> None:
        pytest.fail("the cluster's GPUs are not this machine's")

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_properties", asked)
    monkeypatch.setattr("torch.cuda.device_count", asked)
    facts = gather_facts(
        compose_run(["device=cuda", "model.dtype=bfloat16", "cluster.ray_address=head:6379"])
    )
    assert (facts.num_gpus, facts.gpu_gib) == (0, 0.0)


def test_missing_files_and_models_are_named():
    refused = _refused(gather_facts(compose_run(["task=file", "task.train_path=nowhere.jsonl"])))
    assert refused["task.train_path"] == "no file nowhere.jsonl"
    assert {"task.validation_path", "task.reward", "model.path"} <= set(refused)


def opened(tmp_path: Path, rows: str, *settings: str) -> Facts:
    """What the plan knows of a run on `rows`."""
    model = make_task(ArithmeticConfig(), "", 0).model_folder(tmp_path / "base", 0)
    data = tmp_path / "rows.jsonl"
    data.write_text(rows)
    (tmp_path / "reward_of_a_plan.py").write_text("def right(completion, answer): return 1.0\n")
    given = [f"task.{key}={data}" for key in ("train_path", "validation_path")]
    reward = f"task.reward={tmp_path}/reward_of_a_plan.py:right"
    words = ["task=file", *given, reward, f"model.path={model}", *settings]
    return gather_facts(compose_run(words), opens_data=True)


ROWS = '{"prompt": "1+1=", "answer": ":2"}\n{"prompt": "1+2=", "answer": ":3"}\n'


def test_a_plan_opens_data_and_rewards(tmp_path: Path):
    facts = opened(tmp_path, ROWS)
    assert (facts.refusals, facts.num_train_prompts) == ((), 2)


@pytest.mark.parametrize(
    ("rows", "settings", "setting", "says"),
    [
        (ROWS, ["task.reward=nowhere.py:right"], "task.reward", "nowhere.py"),
        (ROWS, ["task.reward=math:pi"], "task.reward", "is no function"),
        (ROWS, ["task.columns.prompt=asked"], "task.train_path", "rows.jsonl"),
        ('{"prompt": 3, "answer": ":2"}\n', [], "task.train_path", "row 1"),
        ("not json\n", [], "task.train_path", "row"),
    ],
)
def test_a_plan_never_says_that_what_its_data_forbids_can_run(
    tmp_path: Path, rows: str, settings: list[str], setting: str, says: str
):
    [refusal] = opened(tmp_path, rows, *settings).refusals
    assert refusal.setting == setting
    assert says in refusal.reason


@pytest.mark.parametrize(
    ("setting", "refused"),
    [
        ("model.path=nowhere", "model.path"),
        ("engine.optimizer.beta1=1.5", "engine.optimizer.beta1"),
        ("task.level=12", "task.level"),
        ("engine.lora.rank=4 engine.lora.targets=[nope_proj]", "engine.lora.targets"),
        ("run_dir=/dev/null", "run_dir"),
        ("run_dir=/dev/null/x/y", "run_dir"),
        ("run_dir=/proc/x", "run_dir"),
        pytest.param(
            "task.num_heads=4 task.hidden_size=96", "rollout", marks=pytest.mark.vllm
        ),  # 24 dimensions each
    ],
)
def test_what_the_parts_refuse(setting: str, refused: str):
    assert refused in _refused(gather_facts(compose_run(setting.split())))


@pytest.mark.parametrize(
    ("num_ranks", "layout", "refused", "says"),
    [
        (2, ["engine.tensor_parallel_size=2", "task.num_heads=3"], "engine.tensor_parallel_size", "3 attention heads, which 2 do not divide"),
        (8, ["engine.tensor_parallel_size=3"], "engine.num_ranks", "8 ranks are no multiple of the 3"),
        (8, ["engine.pipeline_parallel_size=4"], "engine.pipeline_parallel_size", "2 layers, which 4 do not divide"),
        (8, ["engine.expert_parallel_size=3"], "engine.expert_parallel_size", "3 copies are to share the experts, and there are 8"),
        (8, ["engine.expert_parallel_size=2"], "engine.expert_parallel_size", "0 experts, which 2 do not divide"),
        (8, ["engine.virtual_pipeline_size=2"], "engine.virtual_pipeline_size", "no pipeline to interleave"),
        (8, ["engine.sequence_parallel=true"], "engine.sequence_parallel", "only the ranks of a tensor"),
        (8, ["engine.context_parallel_size=3"], "engine.num_ranks", "8 ranks are no multiple of the 3"),
        (8, ["engine.context_parallel_size=2", "engine.expert_parallel_size=3"], "engine.expert_parallel_size", "and there are 8"),
        (8, ["engine.optimizer.name=adafactor"], "engine.optimizer.name", "no Adafactor"),
    ],
)  # fmt: skip
def test_layouts_of_megatron_that_cannot_be(num_ranks: int, layout: list[str], refused: str, says: str):
    """Also those that the model decides, where the task makes it on the spot."""
    settings = ["engine=megatron", f"engine.num_ranks={num_ranks}", *layout]
    found = gather_facts(compose_run(settings)).refusals
    assert any(item.setting == refused and says in item.reason for item in found), found


def test_an_engine_without_adapters_has_no_settings_of_theirs():
    with pytest.raises(
        SettingError, match=r"`engine.lora.rank` belongs to engine=fsdp2; this run has engine=megatron"
    ):
        compose_run(["engine=megatron", "engine.lora.rank=4"])


def test_the_engine_of_a_role_is_asked_whether_it_can(tmp_path: Path):
    model = make_task(ArithmeticConfig(), "", 0).model_folder(tmp_path, 0)
    settings = [f"model.path={model}", "engine.lora.rank=4", "algorithm=ppo"]
    assert gather_facts(compose_run(settings)).refusals == ()
    for engine, says in (
        ("megatron", "its critic: lora: "),
        ("fsdp3", "no training engine named 'fsdp3'; installed: fsdp2, megatron"),
        ("fsdp2 algorithm.critic_path=nowhere", "its critic: nowhere holds no config.json"),
    ):
        config = compose_run([*settings, *f"algorithm.critic_engine={engine}".split()])
        refused = _refused(gather_facts(config))
        assert says in refused["algorithm"]
        assert [item.setting for item in plan_run(config, gather_facts(config)).refusals] == ["algorithm"]


def test_folders_of_roles_are_looked_at_and_weights_that_are_loaded_whole(tmp_path: Path):
    from transformers import AutoConfig, AutoModelForCausalLM

    model = make_task(ArithmeticConfig(), "", 0).model_folder(tmp_path / "base", 0)
    shape = AutoConfig.from_pretrained(model)
    shape.num_hidden_layers, shape.layer_types = 3, ["full_attention"] * 3
    AutoModelForCausalLM.from_config(shape).save_pretrained(tmp_path / "critic")
    settings = [f"model.path={model}", "algorithm=ppo", f"algorithm.critic_path={tmp_path / 'critic'}"]
    facts = gather_facts(compose_run(settings))
    assert facts.refusals == ()
    assert facts.model is not None
    assert (facts.role_models["critic"].num_layers, facts.model.num_layers) == (3, 2)
    assert not facts.loads_whole
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    assert gather_facts(compose_run([f"model.path={model}"])).loads_whole


def _models(tmp_path: Path, **teacher: int) -> tuple[str, str]:
    """Return the folders of a policy and of a teacher of the same tokens and another shape."""
    made = [
        make_task(config, "", 0).model_folder(tmp_path, 0)
        for config in (ArithmeticConfig(), ArithmeticConfig(hidden_size=132, **teacher))
    ]
    return str(made[0]), str(made[1])


@pytest.mark.parametrize("named", [True, False])
def test_the_memory_of_a_teacher_is_counted_by_its_own_config(tmp_path: Path, named: bool):
    policy, teacher = _models(tmp_path, num_layers=4)
    words = [
        "algorithm=distill",
        f"algorithm.teacher_path={teacher}",
        *([f"model.path={policy}"] if named else []),
    ]
    config = compose_run(words)
    facts = gather_facts(config)
    assert facts.refusals == ()
    assert facts.model is not None
    large = facts.role_models["teacher"].num_params
    assert large > 3 * facts.model.num_params
    rank = plan_run(config, facts).memory[0]
    items = dict(rank.items)
    assert items["teacher weights, float32, sharded"] == 4 * large
    assert items["gathered weights, float32, at most"] == 4 * large


def test_a_teacher_of_other_tokens_is_refused(tmp_path: Path):
    _, teacher = _models(tmp_path)
    _swap(Path(teacher), "3", "4")
    facts = gather_facts(compose_run(["algorithm=distill", f"algorithm.teacher_path={teacher}"]))
    assert (
        _refused(facts)["algorithm"]
        == f"its teacher, {teacher}: 2 of the policy's 20 tokens are others there, '3' for one"
    )


def test_distillation_needs_a_teacher():
    config = compose_run(["algorithm=distill"])
    assert [item.setting for item in plan_run(config, gather_facts(config)).refusals] == [
        "algorithm.teacher_path"
    ]


def _swap(folder: Path, one: str, other: str) -> None:
    """Let two characters of a tokenizer change places."""
    path = folder / "tokenizer.json"
    whole = json.loads(path.read_text())
    words = whole["model"]["vocab"]
    words[one], words[other] = words[other], words[one]
    path.write_text(json.dumps(whole))


def too_long(tmp_path: Path, row: dict[str, str], *settings: str) -> list[str]:
    """Return what a plan refuses of a file that holds a short row and `row`, for a model of 512 positions."""
    task = make_task(ArithmeticConfig(), "", 0)
    model, rows = task.model_folder(tmp_path / "base", 0), tmp_path / "rows.jsonl"
    short = {key: "1" if key != "rejected" else "2" for key in row}
    rows.write_text("".join(json.dumps(one) + "\n" for one in (short, row)))
    files = [f"task.train_path={rows}", f"task.validation_path={rows}", f"model.path={model}"]
    facts = gather_facts(compose_run([*files, *settings]), opens_data=True)
    return [f"{one.setting}: {one.reason}; {one.remedy}" for one in facts.refusals]


@pytest.mark.parametrize(
    ("tokens", "says"),
    [
        (58, []),
        (59, ["rollout.max_model_len: rows.jsonl:2 has 65 tokens, prompt and completion, more than 64; rollout.max_model_len=65"]),
        (600, ["task: rows.jsonl:2 has 606 tokens, prompt and completion, and the model was made for 512 positions"]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("longer", ["chosen", "rejected", "answer"])
def test_rows_that_are_learned_from_fit_the_model_and_what_it_is_told(
    tmp_path: Path, tokens: int, longer: str, says: list[str]
):
    row, settings = {"prompt": "12+34", longer: "7" * tokens}, ["rollout.max_model_len=64"]
    if longer == "answer":
        (tmp_path / "right.py").write_text("def right(completion): return 1.0\n")
        settings += [
            "task=file",
            f"task.reward={tmp_path}/right.py:right",
            "warmup.steps=1",
            "sampling.max_tokens=8",
        ]
    else:
        row |= {"rejected" if longer == "chosen" else "chosen": "8"}
        settings += ["task=pairs", "algorithm=dpo"]
    found = too_long(tmp_path, row, *settings)
    assert len(found) == len(says)
    assert all(one.startswith(said) for one, said in zip(found, says, strict=True))


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]
)
def test_weights_that_are_no_numbers_are_named_with_their_file(tmp_path: Path, dtype: torch.dtype):
    folder = make_task(ArithmeticConfig(), "", 0).model_folder(tmp_path / "model", 0)
    config = compose_run(["algorithm=distill", f"algorithm.teacher_path={folder}", f"model.path={folder}"])
    file = folder / "model.safetensors"
    weights = {name: weight.to(dtype) for name, weight in load_file(file).items()}
    weights["model.norm.weight"][-1] = torch.nan
    save_file(weights, file, metadata={"format": "pt"})
    refused = _refused(gather_facts(config))
    named = "weights hold NaN or infinity: `model.norm.weight` in model.safetensors"
    assert refused == {"model.path": named, "algorithm": f"its teacher, {folder}: {named}"}
    assert "model.path" not in _refused(
        gather_facts(compose_run([f"model.path={folder}", "model.random_init=true"]))
    )
