"""`diloco scaling`: laws from a table, and what they predict."""

import json as writer
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diloco.cli._command import choose
from diloco.errors import UserError
from diloco.scaling.judgement import judge
from diloco.scaling.laws import Kind, Laws
from diloco.scaling.prediction import predict
from diloco.scaling.table import method_name, read_table
from diloco.units import Amount

HELP = "loss and hyperparameters to expect: diloco scaling predict|fit|pictures [--data FILE]"
ORDER = 8


def run(arguments: list[str]) -> None:
    """Fit laws, or predict with them, as a command line asks."""
    choose({"predict": _predict, "fit": _fit, "pictures": _pictures}, arguments, prog="diloco scaling")


def _predict(
    num_params: Amount,
    num_replicas: int = 2,
    fit: Kind | None = None,
    data: Path | None = None,
    overtraining: float = 1.0,
    sync_every: float | None = None,
    json: bool = False,
) -> None:
    """Loss, learning rates, batch and tokens for a model, each with a 95 % interval where data gives one.

    An interval is that of the law, its mean over runs, not of one run.

    Args:
        num_params: N, number of all parameters, such as 124M.
        num_replicas: M; 0 is Data-Parallel.
        fit: joint, one law for all M, or independent, a law for this M; left out, joint where M ≥ 1.
        data: CSV file of your own sweep; left out, the published losses and laws of arXiv 2503.09799.
        overtraining: Tokens as a multiple of 20 a parameter; the loss stays that of the table's budget.
        sync_every: H of the runs to read, where the data has several.
        json: Print JSON.
    """
    laws = _laws(data, sync_every)
    prediction = predict(num_params, num_replicas, fit=fit, laws=laws, overtraining=overtraining)
    if prediction["warning"]:
        print(f"diloco: {prediction['warning']}", file=sys.stderr)
    if json:
        print(writer.dumps(prediction))
        return
    period = f", H = {prediction['sync_every']:g}" if prediction["sync_every"] else ""
    print(f"{method_name(num_replicas)}{period}, {num_params:g} parameters, {prediction['fit']} laws")
    for name in ("loss", "learning_rate", "batch_tokens", "outer_learning_rate", "tokens", "steps"):
        print(f"{name.replace('_', ' '):20} {_estimate(prediction[name])}")


def _fit(data: Path | None = None, sync_every: float | None = None, json: bool = False) -> None:
    """Fit all laws to a table, rank them by how they extrapolate, and find where DiLoCo and Data-Parallel cross.

    Args:
        data: CSV file with params, replicas (0 is Data-Parallel), eval_loss, and maybe learning_rate,
            batch_tokens, outer_learning_rate, sync_every, tokens, seed; left out, the published losses.
        sync_every: H of the runs to read, where the data has several.
        json: Print JSON.
    """
    judgement = judge(_laws(data, sync_every))
    if json:
        print(writer.dumps(judgement))
        return
    _print_laws(judgement)
    _print_forms(judgement)
    _print_extrapolation(judgement)
    for replicas, crossing in judgement["crossings"].items():
        print(_crossing(replicas, crossing))
    for point in judgement["on_edge"]:
        print(
            f"{point['params']:g} parameters, M = {point['replicas']}: the best {point['quantity']}, "
            f"{point['value']:g}, is the smallest or the largest that was tried; a better one may lie beyond"
        )
    for uneven in judgement["uneven"]:
        numbers = ", ".join(f"{number} at {params:g}" for params, number in uneven["num_outer_rates"].items())
        print(f"M = {uneven['replicas']}: unequally many outer learning rates were tried, {numbers} parameters")


def _print_laws(judgement: Mapping[str, Any]) -> None:
    """Print the power laws of each quantity, and their errors at the largest size."""
    for quantity, laws in judgement["laws"].items():
        print(f"{quantity.replace('_', ' ')} = A·N^α, joint: A·N^α·M^β")
        for name, law in laws.items():
            print(f"  {name if name == 'joint' else method_name(int(name)):15} {_law(law)}")
        if judgement["test_errors"][quantity]:
            print("  |log y − log ŷ| at the largest size, left out of the fit:")
        for error in judgement["test_errors"][quantity]:
            print(f"    {error['law']:17} {error['mean']:.4f}   {_by_replicas(error)}")


def _print_forms(judgement: Mapping[str, Any]) -> None:
    """Print the parametric forms of the loss, the best first, and why others could not be fitted."""
    if judgement["forms"] or judgement["forms_refused"]:
        print("forms of the loss, and |log y − log ŷ| at the largest size, which selected them:")
    for form in judgement["forms"]:
        values = ", ".join(f"{symbol} = {value:.4g}" for symbol, value in form["coefficients"].items())
        print(f"    {form['formula']:17} {form['selected_at_largest']:.4f}   {_by_replicas(form)}   {values}")
        published = f"; published: {form['published']:.4f}" if form["published"] else ""
        print(f"    {'':17} among all starts, as the paper selects: {form['selected_among_all']:.4f}{published}")
    for name, reason in judgement["forms_refused"].items():
        print(f"    {name}: {reason}")


def _print_extrapolation(judgement: Mapping[str, Any]) -> None:
    """Print the losses of larger models that were trained later, beside the predictions."""
    if judgement["extrapolation"]:
        print("trained later, beside the predictions of the published laws and of the first of these forms:")
    for later in judgement["extrapolation"]:
        which = f"{method_name(later['replicas'])}, {later['fit']}"
        predictions = (
            f"{name} {later[name]:.3f} ({100 * (later[name] / later['loss'] - 1):+.1f} %)"
            for name in ("law", "form")
            if later[name]
        )
        print(f"    {which:27} {later['params']:.3g} parameters {later['loss']:.3f}   {'   '.join(predictions)}")


def _law(law: dict[str, Any]) -> str:
    """Coefficients with their intervals, and once why there are none."""
    if "reason" in law:
        return law["reason"]
    coefficients = [f"{symbol} {_estimate({**value, 'reason': None})}" for symbol, value in law.items()]
    reasons = dict.fromkeys(f"({value['reason']})" for value in law.values() if value["reason"])
    return "   ".join([*coefficients, *reasons])


def _by_replicas(residual: dict[str, Any]) -> str:
    return ", ".join(f"M = {m}: {value:.4f}" for m, value in residual["by_replicas"].items())


def _crossing(replicas: str, crossing: dict[str, Any]) -> str:
    if crossing["is_lower_above"] is None:
        return f"M = {replicas} has the loss of Data-Parallel at every size"
    if crossing["num_params"] is None:
        more = "less" if crossing["is_lower_above"] else "more"
        return f"by the laws M = {replicas} has {more} loss than Data-Parallel at every size"
    side = "above" if crossing["is_lower_above"] else "below"
    where = f"{crossing['num_params']:.3g}"
    interval = crossing["reason"] or f"{crossing['low']:.3g} … {crossing['high']:.3g}"
    outside = "" if crossing["is_measured"] else ", outside the sizes that were fitted"
    return (
        f"by the laws M = {replicas} has less loss than Data-Parallel {side} {where} parameters "
        f"({interval}){outside}"
    )


def _laws(data: Path | None, sync_every: float | None) -> Laws:
    """The laws of a table, or the published ones."""
    if data is not None:
        return Laws(read_table(data, sync_every=sync_every))
    if sync_every is not None:
        raise UserError(
            f"sync_every={sync_every:g} chooses among the runs of data, and there is none: leave it out",
            *("sync_every", "data"),
        )
    return Laws()


def _estimate(value: Any) -> str:
    if not isinstance(value, dict):
        return str(value)
    if value["value"] is None:
        return f"none ({value['reason']})"
    interval = f" ({value['low']:.4g} … {value['high']:.4g})" if value["low"] is not None else ""
    rounded = f", 2^{value['power_of_two'].bit_length() - 1}" if "power_of_two" in value else ""
    rounded += f", {value['at_power_of_two']:,} at that power of two" if "at_power_of_two" in value else ""
    reason = f" ({value['reason']})" if value.get("reason") else ""
    return f"{value['value']:.4g}{interval}{rounded}{reason}"


def _pictures(data: Path | None = None, output: Path = Path("pictures"), sync_every: float | None = None) -> None:
    """Draw the figures for which the table has columns: loss over size and batch, the gap to Data-Parallel, rates.

    Args:
        data: CSV file of a sweep; left out, the published losses.
        output: Directory to write SVG and PNG files to.
        sync_every: H of the runs to read, where the data has several.
    """
    from diloco.report.figures.laws import draw_laws

    for path in draw_laws(_laws(data, sync_every), output):
        print(path)
