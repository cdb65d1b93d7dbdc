"""A run when it is over."""

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from diloco.report.progress import megabytes
from diloco.training.config import TrainConfig
from diloco.training.loop import Outcome


def print_outcome(config: TrainConfig, outcome: Outcome, console: Console) -> None:
    """Held-out loss, bytes beside Data-Parallel's, where the files are, and a sample."""
    summary = outcome.summary
    sent, data_parallel = summary["bytes_sent_per_replica"], summary["data_parallel_bytes_per_replica"]
    fewer = f" ({data_parallel / sent:,.0f}× as many)" if sent else ""
    table = Table(show_header=False, box=None, pad_edge=False)
    rows = {
        "held-out loss": f"{summary['eval_loss']:.4f} ± {summary['eval_standard_error']:.4f} nats a token, "
        f"{summary['eval_bits_per_byte']:.4f} bits a byte (outer parameters)",
        "trained on": f"{summary['num_tokens']:,} tokens in {summary['wall_seconds']:.0f} s, "
        f"{summary['num_params']:,} parameters, {summary['num_replicas']} replicas",
        "compute utilization": f"{summary['compute_utilization']:.1%}",
        "sent per replica": megabytes(sent),
        "Data-Parallel": f"would have sent {megabytes(data_parallel)}{fewer}",
        "outer hash": summary["outer_hash"][:16],
        "files": escape(str(config.directory)),
    }
    for name, value in rows.items():
        table.add_row(name, value)
    console.print(table, highlight=False, soft_wrap=True)
    console.print("\nThe model writes:\n", highlight=False)
    console.print(escape(outcome.sample), highlight=False)
