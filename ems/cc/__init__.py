"""Context caching: what `Ems.get_cc` hands out."""

from __future__ import annotations
