"""`ems serve`: the node server in the foreground."""

from __future__ import annotations

import os

import click

from ems.server.config import SETTINGS, ConfigError, Setting, load_config

__all__ = ["command"]

EPILOG = """\b
Every option is also an environment variable (EMS_CAPACITY=8GiB) and a key of the TOML file
(capacity = "8GiB"). The option wins over the variable, the variable over the file.

\b
Examples:
  ems serve --capacity 64GiB                      in the foreground, logs to standard error
  ems serve --capacity 64GiB --group inference    for containers that run as other users
  ems serve --config /etc/ems.toml --log-format json --log-dir /var/log/ems

\b
SIGTERM lets saves that are under way finish (at most 5 s); the second one does not wait. The pool
stays in memory for the next server, and clients go on reading it meanwhile. `ems purge` gives the
memory back.
Exit codes: 0 stopped by a signal, 1 failed while serving, 2 refused to start.
"""


def _option(setting: Setting) -> click.Option:
    note = f"{setting.help}  [{setting.variable}]"
    if setting.metavar is not None:
        return click.Option([f"--{setting.name}"], metavar=setting.metavar, help=note)
    names = f"--{setting.name}/--no-{setting.name}"
    return click.Option([names], is_flag=True, default=None, help=note)


def _serve(config: str | None, **options: object) -> None:
    by_name = {name.replace("_", "-"): value for name, value in options.items()}
    try:
        settings = load_config(by_name, os.environ, config)
    except ConfigError as error:
        raise click.UsageError(str(error)) from None
    from ems.server.app import RefusedToStart, run

    try:
        run(settings)
    except RefusedToStart as error:
        click.echo(f"ems serve: {error}", err=True)
        raise SystemExit(2) from None


command = click.Command(
    "serve",
    callback=_serve,
    short_help="Serve a pool to the processes of this node.",
    help="Serve a pool of memory to the processes of this node, in the foreground.\n\n"
    "A pool that is there already is taken over with all its blocks; otherwise one is made.",
    epilog=EPILOG,
    params=[
        *[_option(setting) for setting in SETTINGS],
        click.Option(
            ["--config"], metavar="FILE", help="Read settings from this TOML file.  [EMS_CONFIG]"
        ),
    ],
)
