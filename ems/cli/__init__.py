"""The command line: `ems`, or `python -m ems`. Each module here is one command and is imported when it is called."""
