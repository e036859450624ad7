"""A member that drives an SGLang server by SGLang's own update calls, from a process on the server's machine.

Written to what SGLang documents ("SGLang for RL Systems", docs.sglang.io) and tested against a server that speaks that protocol.
It has not been run against SGLang itself.

    begin     GET /model_info: it still serves the version that was committed to it; the offer is checked as everywhere
    transfer  the bytes are staged in this process, by any transport; the server goes on generating
    verify    digests, as everywhere
    flip      the tensors are written to a folder, read back and compared with what was staged; then
              POST /pause_generation, POST /update_weights_from_disk with `weight_version`, GET /model_info: the version must
              come back; POST /continue_generation
    commit    GET /model_info once more, then the label stands

What holds: until the update is posted the server is asked for nothing but information and serves the old version bit for bit; a
server is only ever pointed at a folder whose bytes were compared; traffic under a version only after the server has said it back.

What cannot hold here:

- SGLang loads in place. When a load fails half-way its weights are torn (what it then calls a roll-back reads the same new
  folder again, as far as its published source goes); so any failure after the update was posted, a missing answer too, fences the
  member off, paused.
- The server echoes the version it was told, not what it holds: no digest is computed inside of it. A canary looks.
- Names and shapes are checked against the model folder that the server names, where this process sees it, or against
  `expected`. `/get_weights_by_name` is of no use for it: it gives values, cut off, and not of every model.
- Casts and quantization on load happen in the server and are not seen here.
"""

from __future__ import annotations

from offbeat_ckptsync.adapters.sglang.member import Loading, PauseMode, SglangMember, SglangServer

__all__ = ["Loading", "PauseMode", "SglangMember", "SglangServer"]
