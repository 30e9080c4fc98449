"""The `shmcache` command: the public API for a terminal. Nothing imports it."""
