# pyright: basic
"""A process that speaks SGLang's documented update protocol over a real model: not SGLang, and no stand-in for it.

It loads safetensors files in place, tensor by tensor, as SGLang does; generates only while it is not paused; and keeps a
record of what it was asked, in order. `python protocol_server.py MODEL_FOLDER` prints its port.

`/weights_checker` hashes what it holds as SGLang 0.5.23 does on CPU; told to be on a GPU, as it does there.

Beside the documented calls: GET /record; POST /misbehave {"how": ..} for the next load: "torn" fails half-way, "silent"
answers after the caller has given up, "liar" keeps its old weight version, "stranger" takes a tensor for one of a name that it does not know;
and POST /reset, to be as when it was started.
"""

from __future__ import annotations

import hashlib
import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from offbeat_ckptsync.adapters.sglang.server import gpu_hash


class Model:
    """Weights that answer: the log-prob of each token after a prompt, from an embedding and a linear layer."""

    def __init__(self, folder):
        self.base = str(folder)
        self.lock = threading.Lock()
        self.reset()

    def reset(self):
        with self.lock:  # a load may be under way
            self.weights = load_file(Path(self.base) / "model.safetensors")
            self.path = self.base
            self.version = "default"
            self.paused = False
            self.how = ""
            self.device = "cpu"
            self.num_ranks = 1
            self.record = []

    def answer(self, ids):
        hidden = self.weights["embed.weight"][ids].mean(0)
        return (self.weights["head.weight"] @ hidden).log_softmax(-1).tolist()

    def checksums(self):
        return {name: self.hashed(tensor) for name, tensor in self.weights.items()}

    def hashed(self, tensor):
        if self.device == "cuda":
            return f"{gpu_hash(tensor.reshape(-1).view(torch.uint8)):016x}"
        return hashlib.sha256(tensor.numpy().tobytes()).digest()[:8].hex()

    def load(self, folder, version):
        how, self.how = self.how, ""
        with safe_open(Path(folder) / "model.safetensors", framework="pt") as file:
            for number, name in enumerate(file.keys()):
                if how == "torn" and number == 1:
                    return False, "Failed to update weights: planted half-way."
                if how != "stranger" or number:
                    self.weights[name].copy_(file.get_tensor(name))
        if how == "silent":
            time.sleep(3)
        if how != "liar":
            self.path, self.version = folder, version
        return True, "Succeeded to update model weights."


class Server(ThreadingHTTPServer):
    daemon_threads = True
    model: Model


class Handler(BaseHTTPRequestHandler):
    server: Server  # pyright: ignore[reportIncompatibleVariableOverride] -- it is started by that alone

    def do_GET(self):
        model = self.server.model
        match self.path:
            case "/model_info":
                self.reply(
                    200, {"model_path": model.path, "weight_version": model.version, "is_generation": True}
                )
            case "/server_info":
                self.reply(
                    200, {"device": model.device, "tp_size": model.num_ranks, "model_path": model.base}
                )
            case "/record":
                self.reply(200, {"record": model.record, "paused": model.paused})
            case _:
                self.reply(404, {"detail": "Not Found"})

    def do_POST(self):
        model = self.server.model
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        match self.path:
            case "/generate":
                if model.paused:
                    self.reply(503, {"error": "paused"})
                else:
                    self.reply(
                        200, {"logprobs": model.answer(body["input_ids"]), "weight_version": model.version}
                    )
            case "/reset":
                model.reset()
                self.reply(200, {})
            case "/misbehave":
                model.how = body["how"]
                model.device = body.get("device", "cpu")
                model.num_ranks = body.get("num_ranks", 1)
                self.reply(200, {})
            case "/pause_generation" | "/continue_generation":
                model.record.append((self.path, body))
                model.paused = self.path == "/pause_generation"
                self.reply(200, {"message": "done", "status": "ok"})
            case "/weights_checker":
                ranks = [{"checksums": model.checksums()}]
                self.reply(200, {"success": True, "message": "Success.", "ranks": ranks})
            case (
                "/init_weights_update_group" | "/destroy_weights_update_group"
            ):  # it says so, and meets nobody
                model.record.append((self.path, body))
                self.reply(200, {"success": True, "message": "done"})
            case "/update_weights_from_disk":
                model.record.append((self.path, body))
                with model.lock:
                    success, message = model.load(
                        body["model_path"], body.get("weight_version") or model.version
                    )
                self.reply(200 if success else 400, {"success": success, "message": message})
            case _:
                self.reply(404, {"detail": "Not Found"})

    def reply(self, status, content):
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format, *args):
        pass


if __name__ == "__main__":
    server = Server(("127.0.0.1", 0), Handler)
    server.model = Model(sys.argv[1])
    print(server.server_address[1], flush=True)
    server.serve_forever()
