"""Shared memory: a pool's files, mapped segments, locks that prove who lives, the room there is."""
