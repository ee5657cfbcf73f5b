"""Shared memory: the files of a pool, the mapped segments, the locks that prove who lives, the room there is."""
