"""`python -m offbeat_ckptsync.bench` is `offbeat-sync-bench`."""

from __future__ import annotations

import sys

from offbeat_ckptsync.bench.cli import main

if __name__ == "__main__":
    sys.exit(main())
