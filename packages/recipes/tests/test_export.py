"""`offbeat export`: any checkpoint of a run as a folder that transformers and peft load, to the bit."""

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from offbeat_engine import World, engine_class
from offbeat_engine.batch import SftLoss
from offbeat_engine.testing import make_tiny_model, random_batch
from offbeat_recipes.cli._hydra import compose_run, to_yaml
from offbeat_recipes.cli.main import main
from offbeat_recipes.run.export import _name_of


def saved_run(folder, model, *settings, steps=2):
    """Return the folder of a run with a checkpoint after each step, and the weights that each would export."""
    config = compose_run(["task=file", f"model.path={model}", f"run_dir={folder}", *settings])
    folder.mkdir()
    (folder / "config.yaml").write_text(to_yaml(config))
    engine = engine_class("fsdp2")(config.engine_config(str(model)), World())
    engine.init_model()
    engine.set_loss_fn(SftLoss())
    weights = {}
    for step in range(1, steps + 1):
        with engine.train_mode():
            engine.forward_backward_step(random_batch(4))
            engine.optimizer_step()
            engine.optimizer_zero_grad()
        engine.save_checkpoint(str(folder / "checkpoints" / "policy"), global_step=step)
        weights[step] = {name: tensor.clone() for name, tensor in engine.named_weights()}
    engine.close()
    return weights


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    torch.set_num_threads(1)
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def test_the_newest_and_a_named_checkpoint_with_a_card(tmp_path, model, capsys):
    weights = saved_run(tmp_path / "run", model)
    (tmp_path / "run" / "summary.json").write_text(json.dumps({"reward_last": 0.75, "reward_first": None}))
    assert main(["export", str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/run/exports/step_2\n"
    assert main(["export", str(tmp_path / "run"), "--step", "1", "--to", str(tmp_path / "one")]) == 0
    for folder, step in ((tmp_path / "run/exports/step_2", 2), (tmp_path / "one", 1)):
        written = load_file(folder / "model.safetensors")
        assert written.keys() == weights[step].keys()
        assert all(torch.equal(written[name], weights[step][name]) for name in written)
    card = (tmp_path / "one" / "README.md").read_text()
    assert "step 1" in card
    assert "| reward last | 0.75 |" in card
    assert "reward first" not in card
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "one") is not None


def test_adapters_alone_and_merged(tmp_path, model):
    merged = saved_run(tmp_path / "run", model, "engine.lora.rank=2", "engine.lora.export=merged", steps=1)[1]
    assert main(["export", str(tmp_path / "run"), "--to", str(tmp_path / "merged")]) == 0
    assert (
        main(["export", str(tmp_path / "run"), "--to", str(tmp_path / "adapter"), "--lora", "adapter"]) == 0
    )
    written = load_file(tmp_path / "merged" / "model.safetensors")
    assert all(torch.equal(written[name], merged[name]) for name in merged)
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()


@pytest.fixture
def hub():
    """The few answers of a hub that an upload of small files needs; what it was sent lies in `hub.seen`."""

    class Hub(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self.server.seen.append((self.path, self.headers["Authorization"], body))
            if self.server.refuses:
                self.answer(403, {"error": "You have no write access"})
            elif "preupload" in self.path:
                files = [
                    {**file, "uploadMode": "regular", "shouldIgnore": False}
                    for file in json.loads(body)["files"]
                ]
                self.answer(200, {"files": files})
            else:
                at = f"http://127.0.0.1:{self.server.server_port}/me/tiny"
                self.answer(200, {"url": at, "commitUrl": f"{at}/commit/{'0' * 40}", "commitOid": "0" * 40})

        def answer(self, code, values):
            body = json.dumps(values).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        server.seen, server.refuses = [], False
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.mark.deep
def test_push_uploads_the_exported_folder_to_a_private_repository(tmp_path, model, hub):
    saved_run(tmp_path / "run", model, steps=1)
    command = [sys.executable, "-m", "offbeat_recipes.cli.export", str(tmp_path / "run"), "--push"]
    at_hub = {
        "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_OFFLINE": "0",
        "HF_HOME": str(tmp_path),
    }

    def pushed(name, **environment):
        return subprocess.run(
            [*command, name], env={**os.environ, **at_hub, **environment},
            capture_output=True, text=True, timeout=600, check=False,
        )  # fmt: skip

    done = pushed("me/tiny")
    assert (done.returncode, "no token of the Hugging Face hub here" in done.stderr) == (2, True)
    done = pushed("not a name", HF_TOKEN="hf_secret")
    assert (done.returncode, "expected OWNER/NAME" in done.stderr) == (2, True)
    assert not (tmp_path / "run" / "exports").exists(), "nothing is exported that cannot be pushed"

    done = pushed("me/tiny", HF_TOKEN="hf_secret")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{tmp_path}/run/exports/step_1", f"{at_hub['HF_ENDPOINT']}/me/tiny"]
    made, *_, (_, token, commit) = hub.seen
    assert made[0] == "/api/repos/create"
    asked = json.loads(made[2])
    assert asked.get("private") or asked.get("visibility") == "private", (
        asked
    )  # the latter since the client's version 2
    assert token == "Bearer hf_secret"
    sent = [json.loads(line)["value"]["path"] for line in commit.splitlines() if b'"file"' in line]
    assert sorted(sent) == sorted(path.name for path in (tmp_path / "run/exports/step_1").iterdir())

    hub.refuses = True
    done = pushed("me/tiny", HF_TOKEN="hf_secret")
    assert done.returncode == 2
    assert "no write access" in done.stderr
    assert f"hf upload me/tiny {tmp_path}/run/exports/step_1" in done.stderr


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/home/me/models/tiny", "tiny"),
        ("/home/me/hub/models--Qwen--Qwen2.5-0.5B/snapshots/abc", "Qwen/Qwen2.5-0.5B (commit abc)"),
        ("", ""),
    ],
)
def test_a_card_names_the_model_and_no_folder_of_this_machine(path, name):
    assert _name_of(path) == name


def test_what_cannot_be_exported_is_said(tmp_path, model, capsys):
    assert main(["export", str(tmp_path)]) == 2
    assert (
        capsys.readouterr().err
        == f"offbeat export: {tmp_path} is no folder of a run: it has no config.yaml\n"
    )
    saved_run(tmp_path / "run", model, steps=1)
    assert main(["export", str(tmp_path / "run"), "--step", "7"]) == 2
    assert "no whole checkpoint of step 7; found [1]" in capsys.readouterr().err
    (tmp_path / "run" / "checkpoints").rename(tmp_path / "gone")
    assert main(["export", str(tmp_path / "run")]) == 2
    assert "has no checkpoints" in capsys.readouterr().err
