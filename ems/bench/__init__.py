"""Workloads and measurements: what `ems demo`, `ems replay` and `ems bench` run."""

from __future__ import annotations
