"""The vocabulary of EMS: errors, configuration, options, results, keys, deadlines, counters."""

from __future__ import annotations
