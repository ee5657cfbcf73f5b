"""The command line, `ems` or `python -m ems`: one module a command, imported when it is called."""
