"""What `trnsim calibrate --steps` shows: the efficiency, and how far every measured step is off."""

from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from ..calibrate_steps import KEY, StepCalibration, StepError
from ..measured_steps import MeasuredStep
from .calibration_tables import markdown, percent, table

HEADS = ("step", "plan", "measured", "kernels", "error", "model", "error", "left out")
NOTE = (
    f"seconds. kernels: compute at the pace of its kernels; model: at {KEY} of it. "
    "left out: fitted without that step."
)


def steps_view(found: StepCalibration) -> RenderableType:
    """Tables for a terminal."""
    rows = [(name, *times) for name, _, *times in step_rows(found)]
    shown = table("training steps", [head for head in HEADS if head != "plan"], rows)
    notes = [Text(f"{e.step.name}: {asked(e.step)}; {_sources(e.step)}") for e in found.errors]
    return Group(shown, Text(summary_line(found)), Text(NOTE), *notes)


def steps_markdown(found: StepCalibration) -> str:
    """The same as Markdown."""
    return f"{markdown(HEADS, step_rows(found))}\n{summary_line(found)}"


def steps_json(found: StepCalibration) -> dict[str, Any]:
    """Everything as plain values; times in ps, errors as fractions."""
    return {
        KEY: found.efficiency,
        "worst": found.worst,
        "steps": [_step_json(error) for error in found.errors],
    }


def _step_json(error: StepError) -> dict[str, Any]:
    return {
        "step": error.step.name,
        "plan": asked(error.step),
        "source": error.step.source,
        "others": error.step.others,
        "measured_ps": round(error.step.ps),
        "kernels_ps": error.raw,
        "modelled_ps": error.modelled,
        "left_out_ps": error.left_out,
        "kernels_error": error.deviation_raw,
        "error": error.deviation,
        "error_left_out": error.deviation_left_out,
    }


def asked(step: MeasuredStep) -> str:
    """`32 x trn1.32xlarge, dp=32,tp=32, 1024 x 8192 tokens by 1, zero 1, ...`."""
    batch = f"{step.global_batch} x {step.seq} tokens by {step.microbatch}"
    choices = f"zero {step.zero}, recompute {step.recompute}, {step.schedule}"
    return f"{step.nodes} x {step.instance}, {step.mesh}, {batch}, {choices}"


def _sources(step: MeasuredStep) -> str:
    others = f"; {step.others}" if step.others else ""
    return f"{step.sequences_per_s:g} sequences/s, {step.source}{others}"


def step_rows(found: StepCalibration) -> list[tuple[str, ...]]:
    """One row per step, as text."""
    return [
        (
            error.step.name,
            asked(error.step),
            f"{error.step.ps / 1e12:.2f}",
            f"{error.raw / 1e12:.2f}",
            percent(error.deviation_raw),
            f"{error.modelled / 1e12:.2f}",
            percent(error.deviation),
            percent(error.deviation_left_out),
        )
        for error in found.errors
    ]


def summary_line(found: StepCalibration) -> str:
    """The number, and the worst of the errors."""
    return f"{KEY} {found.efficiency:g}; worst error {found.worst:.1%}"
