"""A run when it is over."""

from rich.console import Console

from diloco.report.terminal.progress import megabytes
from diloco.training.config import TrainConfig
from diloco.training.summary import Outcome


def print_outcome(config: TrainConfig, outcome: Outcome, console: Console) -> None:
    """Held-out loss, bytes beside Data-Parallel's, where the files are, and a sample."""
    summary = outcome.summary
    sent, data_parallel = summary["bytes_sent_per_replica"], summary["data_parallel_bytes_per_replica"]
    error = f" ± {summary['eval_standard_error']:.4f}" if summary["eval_standard_error"] is not None else ""
    rows = {
        "held-out loss": f"{summary['eval_loss']:.4f}{error} nats a token (of the outer parameters)",
        "bits per byte": f"{summary['eval_bits_per_byte']:.4f}",
        "trained on": f"{summary['num_tokens']:,} tokens in {summary['wall_seconds']:.0f} s: "
        f"{summary['num_params']:,} parameters, {summary['num_replicas']} replicas",
        "compute utilization": f"{summary['compute_utilization']:.1%}",
        "sent per replica": megabytes(sent),
        "Data-Parallel": f"would have sent {megabytes(data_parallel)}"
        + (f", {data_parallel / sent:,.0f}× as much" if sent else ""),
        "outer hash": summary["outer_hash"][:16],
        "files": str(config.directory),
    }
    for name, value in rows.items():
        console.print(f"{name:21}{value}", highlight=False, markup=False, soft_wrap=True)
    console.print(f"\nThe model writes:\n\n{outcome.sample}", highlight=False, markup=False)
