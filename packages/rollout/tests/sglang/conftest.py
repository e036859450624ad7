# pyright: basic
"""What tests over real SGLang servers share."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def load_folder():
    """Return what has an engine's server load the weights in a folder: the least that brings an engine new ones."""

    async def load(engine, folder, version, **more):
        async def ask():
            said = await engine._client().post(
                "/update_weights_from_disk",
                {
                    "model_path": str(folder),
                    "weight_version": str(version),
                    "flush_cache": more.get("recompute_kv", False),
                },
            )
            assert said["success"], said

        await engine.weight_updates().load(ask, version, **more)

    return load
