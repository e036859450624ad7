"""The one stream of groups from generation to training: gate, buffer, producer, journal, replay."""
