"""A client of a pool: its session, its operations, and when they run."""

from __future__ import annotations
