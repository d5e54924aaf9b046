"""Run a plan over a trace: sequence by sequence, only cells that are not there, then collect."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tracekit import schema
from tracekit.progress import Progress, Silent
from tracekit.simulate.collect import collect
from tracekit.simulate.manifest import make_manifest
from tracekit.simulate.plan import Plan, make_plan
from tracekit.simulate.pool import run_sequences
from tracekit.simulate.refusals import refuse_impossible
from tracekit.simulate.results import Results
from tracekit.trace.reader import Trace
from tracekit.trace.validate import require_whole
from tracekit.trace.writer import disk_errors

if TYPE_CHECKING:
    from tracekit.trace.folder import AnyPath


@dataclass(frozen=True)
class Simulated:
    """What a simulation left: its folder, cells computed and found, skips and failures.

    ``fitted`` is what a fitted budget gained, in a sentence; None if none was fitted.
    """

    path: Path
    num_computed: int
    num_found: int
    skipped: tuple[dict[str, str], ...]
    failed: tuple[dict[str, str], ...]
    fitted: str | None = None


def simulate(
    trace: str | AnyPath | Trace,
    out: str | Path,
    plan: Plan | None = None,
    *,
    jobs: int = 1,
    progress: Progress | None = None,
) -> Simulated:
    """Replay a trace under a plan; finished cells are found and not computed again.

    Parameters
    ----------
    trace
        A trace, or its folder or URL.
    out
        Folder of the results: new, empty, or results of the same trace.
    plan
        What to compute (``make_plan``); None: the default set of all questions.
    jobs
        Processes that share the sequences.
    progress
        Listener.

    Returns
    -------
    Simulated
        Cells that failed are listed; the others are in the folder all the same.

    Raises
    ------
    TraceError
        If the trace lacks what the plan needs.
    InputError
        If the folder belongs to something else.
    """
    trace = trace if isinstance(trace, Trace) else Trace(trace)
    plan, progress, out = plan or make_plan(), progress or Silent(), Path(out)
    refuse_impossible(trace, plan)
    require_whole(trace)
    with disk_errors(out):
        manifest = make_manifest(trace, plan)
        results = Results(out, manifest)
        _tell_calibrated(progress, plan, manifest["calibrated"])
        names = [str(name) for name in trace.sequences["sequence_id"]]
        progress.start("simulating", len(names), "sequences")
        done = []
        for one in run_sequences(trace, out, plan, names, jobs, progress):
            done.append(one)
            progress.advance()
        skipped = [row for one in done for row in one.skipped]
        failed = [row for one in done for row in one.failed]
        _tell(progress, skipped, failed)
        collect(trace, results, plan, done)
        fitted = _fit(trace, plan, progress, results)
        results.write_run(skipped=skipped, failed=failed, fitted=fitted, finished=True)
    computed = sum(one.num_computed for one in done)
    found = sum(one.num_found for one in done)
    return Simulated(out, computed, found, tuple(skipped), tuple(failed), fitted)


def _tell_calibrated(progress: Progress, plan: Plan, calibrated: list[str]) -> None:
    """Say where a trace has fewer sequences than are to be run at all levels."""
    if plan.calibrate is not None and len(calibrated) < plan.calibrate:
        progress.say(
            f"calibrating on {len(calibrated)} sequences, all that have influence probes, and not "
            f"on {plan.calibrate}."
        )


def _tell(progress: Progress, skipped: list[dict[str, str]], failed: list[dict[str, str]]) -> None:
    """Say what failed, and which policies do not apply to how many sequences, and why."""
    for failure in failed:
        progress.say(f"cell {failure['cell']} failed: {failure['why']}")
    # A policy is skipped at each level; a sequence is counted once.
    sequences: dict[tuple[str, str], set[str]] = {}
    for one in skipped:
        sequences.setdefault((one["what"], one["why"]), set()).add(one["sequence_id"])
    for (what, why), found in sequences.items():
        progress.say(f"{what} does not apply to {len(found)} sequences: {why}")


def _fit(trace: Trace, plan: Plan, progress: Progress, results: Results) -> str | None:
    """Fit a budget on half of the swept sequences and try it on the others, if it is wanted."""
    sweep = plan.sweep
    if sweep is None or sweep.fit_to is None:
        return None
    from tracekit.simulate.held_out import fit_and_try
    from tracekit.simulate.recorded_model import RecordedModel

    gain = fit_and_try(
        trace,
        RecordedModel(trace, plan.inside, progress).loaded,
        results.read_table(schema.LAYER_RESULTS).to_pandas(),
        sweep.fit_to,
        kept_frac=sweep.fit_kept,
        seed=plan.seed,
        progress=progress,
    )
    return f"{gain.text}: {gain.message}"
