"""The training loops, and the one stream of groups from generation to training: buffer, producer, journal, replay."""
