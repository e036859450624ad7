"""A member that drives an SGLang server by SGLang's own update calls, from a process on the server's machine.

Its sink, `ServerSink`, serves runs as well, whose generation adapter has the server rest.

Run with SGLang 0.5.23 on CPU, and, for what a real server does not do when it is told to, against a server that speaks
the same protocol. For servers on GPUs it is written after SGLang's source; it was never run on one.

    begin     GET /model_info: it still serves the version that was committed to it; the offer is checked as everywhere
    transfer  the bytes are staged in this process, by any transport, and hashed; by files they are written to a folder, read back
              and compared with what was staged. The server goes on generating
    verify    digests, as everywhere
    flip      by files: POST /pause_generation, POST /update_weights_from_disk with `weight_version`.
              By tensors or a group (0.5.21 and later): POST /pause_generation, then SGLang's session:
              /begin_weight_update, /update_weights_from_tensor or /update_weights_from_distributed, /end_weight_update. The
              group, of this process and the server's ranks, over gloo or NCCL, is made before the pause. Then, in all ways,
              GET /model_info: the version must come back; POST /weights_checker: each parameter must be what was sent;
              POST /continue_generation
    commit    GET /model_info once more, then the label stands

What holds: until the update is posted the server is asked for nothing but information and serves the old version bit for bit; a
server is only ever pointed at a folder whose bytes were compared; traffic under a version only after the server has said it back
and was seen to hold it (`proof`): SGLang calls an update a success whatever names were in it.

What cannot hold here:

- SGLang loads in place. When a load fails half-way its weights are torn (what it then calls a roll-back reads the same new
  folder again, as far as its published source goes); so any failure after the update was posted, a missing answer too, fences the
  member off, paused.
- Names and shapes are checked against the model folder that the server names, where this process sees it, or against
  `expected`; with neither nothing is sent, as a tensor of another shape would end the server. `/get_weights_by_name` is of no use for it: it gives values, cut off, and not of every model.
- A model whose parameters `proof` does not know (quantized weights, pipelines) is refused, or taken without
  proof by `Loading(prove=False)`: then casts and quantization on load are not seen, and the version that the server says is all
  there is. A canary looks.
- A server on GPUs that is told of tensors by CUDA IPC (`Way.TENSORS`) ends if their sender dies before it has opened them, and one
  in a group over NCCL when torch's watchdog there gives up on a sender that died. By files, and on CPUs, it does not.
"""

from __future__ import annotations

from offbeat_ckptsync.adapters.sglang.member import Loading, PauseMode, ServerSink, SglangMember, Way
from offbeat_ckptsync.adapters.sglang.server import SglangServer

__all__ = ["Loading", "PauseMode", "ServerSink", "SglangMember", "SglangServer", "Way"]
