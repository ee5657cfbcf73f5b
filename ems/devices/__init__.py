"""Where callers' memory lies: one back end per kind of device, found by name."""

from __future__ import annotations
