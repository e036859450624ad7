from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import xxhash

from offbeat_ckptsync.ends import digest as module
from offbeat_ckptsync.ends.digest import digest, sum64, sum64_by_kernel

WORD = 1 << 64


def slow_sum64(data: bytes) -> str:
    """The formula of the module's docstring with Python's integers: the reference."""
    total = len(data) * 0x9E3779B97F4A7C15
    for i in range((len(data) + 7) // 8):
        word = int.from_bytes(data[8 * i : 8 * i + 8].ljust(8, b"\0"), "little")
        z = (word + (i + 1) * 0x9E3779B97F4A7C15) % WORD
        z = (z ^ (z >> 32)) * 0xD6E8FEB86659FD93 % WORD
        z = (z ^ (z >> 29)) * 0xA0761D6478BD642F % WORD
        total += z ^ (z >> 32)
    return f"sum64-{total % WORD:016x}"


def some(num_bytes, seed=0):
    rng = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (num_bytes,), generator=rng).to(torch.uint8)


@pytest.mark.parametrize("num_bytes", [0, 1, 7, 8, 9, 64, 1001, 4096])
def test_sum64_is_what_its_description_says(num_bytes):
    payload = some(num_bytes)
    assert sum64(payload) == slow_sum64(bytes(payload.tolist()))
    assert sum64(some(num_bytes + 3)[3:]) == slow_sum64(bytes(some(num_bytes + 3)[3:].tolist()))


def test_sum64_in_spans_is_the_same(monkeypatch):
    whole = sum64(some(5000))
    monkeypatch.setattr(module, "_SPAN_BYTES", 1024)
    assert sum64(some(5000)) == whole


def test_any_single_bit_and_the_order_and_the_length_count():
    payload = some(256)
    seen = {sum64(payload), sum64(payload[:255]), sum64(torch.cat([payload, payload.new_zeros(1)]))}
    for bit in range(256 * 8):
        changed = payload.clone()
        changed[bit // 8] ^= 1 << (bit % 8)
        seen.add(sum64(changed))
    swapped = payload.clone()
    swapped[:8], swapped[8:16] = payload[8:16], payload[:8]
    assert len(seen | {sum64(swapped)}) == 256 * 8 + 4


def test_on_the_host_a_digest_is_xxh3():
    payload = some(1001)
    assert digest(payload) == xxhash.xxh3_128_hexdigest(bytes(payload.tolist()))


SIZES = [0, 1, 8, 13, 8 * 2048, 8 * 2048 * 8, 3 * 8 * 2048 * 8 + 77]


def print_digests_by_kernel():
    """For a process in which Triton interprets, before it is imported."""
    for size in SIZES:
        print(sum64_by_kernel(some(size)))
        print(sum64_by_kernel(some(size + 3)[3:]))


@pytest.mark.spawns
def test_the_kernel_computes_what_the_reference_does():
    pytest.importorskip("triton", reason="no Triton here")
    ran = subprocess.run(
        [sys.executable, __file__],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    expected = [sum64(each) for size in SIZES for each in (some(size), some(size + 3)[3:])]
    assert ran.stdout.split() == expected


@pytest.mark.gpu(1)
@pytest.mark.parametrize("size", SIZES)
def test_the_kernel_computes_on_a_gpu_what_the_reference_does(size):
    payload = some(size).cuda()
    assert sum64_by_kernel(payload) == sum64(payload)


@pytest.mark.gpu(1)
def test_a_gpu_computes_what_the_host_does():
    payload = some((40 << 20) + 5)
    assert digest(payload.cuda()) == sum64(payload)


if __name__ == "__main__":
    print_digests_by_kernel()
