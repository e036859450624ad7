# pyright: basic
"""Wire values as JSON text, which is what most carriers make of them."""

from __future__ import annotations

import json

from offbeat_ckptsync.toolkit.wire import decode, encode


def dumps(value):
    return json.dumps(encode(value), separators=(",", ":"))


def loads(kind, text):
    return decode(kind, json.loads(text))
