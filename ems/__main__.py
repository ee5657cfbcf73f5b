"""`python -m ems` is the same program as `ems`."""

from __future__ import annotations

from ems.cli.main import main

if __name__ == "__main__":
    main()
