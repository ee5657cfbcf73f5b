"""`ems doctor`: which accelerators and runtimes are here, and what EMS does with them."""

from __future__ import annotations

import dataclasses
import json
import sys

import click

from ems.devices.probe import RuntimeReport, TorchReport, chosen, probe_runtimes, probe_torch
from ems_native import _copy

__all__ = ["command"]


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(as_json: bool) -> None:
    """Tell which accelerator runtimes were found, what they lack, and what EMS_DEVICE comes to.

    Initialises the runtimes that are there. Exit codes: 0 EMS works with what EMS_DEVICE says; 1
    something is wrong, and the output says what to do.
    """
    runtimes, torch = probe_runtimes(), probe_torch()
    said, outcome = chosen()
    healthy = outcome.startswith("memory of ") and torch.problem is None
    if as_json:
        report = {
            "device": {"EMS_DEVICE": said, "outcome": outcome},
            "cpu": {"copy": _copy.implementation()},
            "runtimes": [dataclasses.asdict(one) for one in runtimes],
            "torch": dataclasses.asdict(torch),
            "healthy": healthy,
        }
        click.echo(json.dumps(report))
    else:
        click.echo(f"EMS_DEVICE  {said}: {outcome}")
        click.echo(f"cpu         copies with {_copy.implementation()}")
        for one in runtimes:
            click.echo("\n".join(_runtime_lines(one)))
        click.echo("\n".join(_torch_lines(torch)))
    sys.exit(0 if healthy else 1)


def _runtime_lines(report: RuntimeReport) -> list[str]:
    head = f"{report.name:<11}"
    if report.path is None:
        return [f"{head} no runtime: {report.problem}"]
    count = "" if report.devices is None else f", {report.devices} devices"
    lines = [f"{head} {report.path}, version {report.version or 'unknown'}{count}"]
    details = {
        "problem": report.problem,
        "missing": ", ".join(report.missing) or "no call",
        "pages": report.page_bytes,
        "host memory": report.registration,
    }
    return lines + [f"  {name:<12}{text}" for name, text in details.items() if text is not None]


def _torch_lines(report: TorchReport) -> list[str]:
    lines = [f"torch       {report.torch or 'not installed'}"]
    if report.torch_npu is not None:
        lines.append(f"torch_npu   {report.torch_npu}")
    if report.problem is not None:
        lines.append(f"  problem     {report.problem}")
    if report.cure is not None:
        lines.append(f"  cure        {report.cure}")
    return lines
