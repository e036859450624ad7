"""How buckets travel: each module is one transport, found by its name in `offbeat_ckptsync.toolkit.config`."""
