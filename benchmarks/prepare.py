"""The speed of `diloco data prepare` beside that of the tokenizers library alone on as many cores.

    python benchmarks/prepare.py --text TEXT.jsonl --output DIR

Prints, for 1, 2, 4, … cores, the MB/s of one process with as many threads of the library; of as many processes
with one thread each, which do nothing but tokenize; and of the preparation with as many workers, their start
included, and its share of the better of those two. The text is repeated up to `--megabytes` per core. The digest
must be the same for 1 and for 8 workers.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from diloco.data.config import DataConfig
from diloco.data.prepare import prepare
from diloco.data.shards import read_index, total
from diloco.data.tokenizers import load_tokenizer, train_bpe
from diloco.files import num_cores

BATCH_BYTES = 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, help="a .jsonl of rows with a text")
    parser.add_argument("--output", type=Path, required=True, help="directory for what is made")
    parser.add_argument("--vocabulary", type=int, default=32_768)
    parser.add_argument("--megabytes", type=float, default=24.0, help="text per core")
    parser.add_argument("--cores", type=int, nargs="+", default=[2**i for i in range(num_cores().bit_length())])
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    print(f"{num_cores()} cores, {options.megabytes:g} MB of text per core")
    tokenizer, texts = options.output / "tokenizer.json", texts_of(options.text)
    size = sum(len(text.encode()) for text in texts) / 1e6
    for threads in sorted({1, max(options.cores)}):
        environment = {"RAYON_NUM_THREADS": threads}
        (seconds,) = in_processes(train, environment, options.text, options.vocabulary, tokenizer)
        print(f"train bpe:{options.vocabulary} on {size:.1f} MB, {threads} threads: {seconds:.2f} s", flush=True)
    print("MB/s\ncores  threads  processes  prepare  share")
    for cores in options.cores:
        rows, output = options.output / f"{cores}.jsonl", options.output / "prepared"
        write_rows(rows, texts, cores * options.megabytes)
        library = [tokenizer, options.text, min(options.megabytes, 8.0)]
        (threads,) = in_processes(tokenize, {"RAYON_NUM_THREADS": cores}, *library)
        processes = cores * min(in_processes(tokenize, {"TOKENIZERS_PARALLELISM": "false"}, *library, count=cores))
        ours, _ = prepared(rows, tokenizer, output, cores)
        share = ours / max(threads, processes)
        print(f"{cores:>5} {threads:>8.2f} {processes:>10.2f} {ours:>8.2f} {share:>6.2f}", flush=True)
    rows = options.output / f"{options.cores[0]}.jsonl"
    digests = {prepared(rows, tokenizer, options.output / "prepared", workers)[1] for workers in (1, 8)}
    assert len(digests) == 1, digests
    print(f"digest with 1 and with 8 workers: {digests.pop()}")


def texts_of(path: Path) -> list[str]:
    return [json.loads(line)["text"] for line in path.read_text().splitlines()]


def write_rows(path: Path, texts: list[str], megabytes: float) -> None:
    with path.open("w") as file:
        for number, text in enumerate(repeated(texts, megabytes)):
            file.write(json.dumps({"id": str(number), "text": text}) + "\n")


def repeated(texts: list[str], megabytes: float) -> Iterator[str]:
    """Texts, again from the first one after the last one, up to so many megabytes."""
    left = megabytes * 1e6
    for text in itertools.cycle(texts):
        yield text
        left -= len(text.encode())
        if left <= 0:
            return


def in_processes(function: Any, environment: dict[str, object], *arguments: Any, count: int = 1) -> list[float]:
    """The results of a function in new processes with variables that the library reads at its start."""
    context = multiprocessing.get_context("spawn")
    results, barrier = context.SimpleQueue(), context.Barrier(count)
    os.environ.update({name: str(value) for name, value in environment.items()})
    processes = [context.Process(target=function, args=(results, barrier, *arguments)) for _ in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0, process.exitcode
    values = [results.get() for _ in processes]
    for name in environment:
        del os.environ[name]
    return values


def train(results: Any, _: Any, text: Path, vocabulary: int, path: Path) -> None:
    texts = texts_of(text)
    start = time.perf_counter()
    train_bpe(texts, vocabulary, path)
    results.put(time.perf_counter() - start)


def tokenize(results: Any, barrier: Any, tokenizer: Path, text: Path, megabytes: float) -> None:
    """MB/s of the library alone."""
    backend, batch, batch_bytes, num_bytes = load_tokenizer(tokenizer)._backend, list[str](), 0, 0
    texts = [*repeated(texts_of(text), megabytes)]
    barrier.wait(60)
    start = time.perf_counter()
    for one in texts:
        batch.append(one)
        batch_bytes += len(one)
        if batch_bytes >= BATCH_BYTES or one is texts[-1]:
            backend.encode_batch_fast(batch, add_special_tokens=False)
            num_bytes += sum(len(each.encode()) for each in batch)
            batch, batch_bytes = [], 0
    results.put(num_bytes / 1e6 / (time.perf_counter() - start))


def prepared(rows: Path, tokenizer: Path, output: Path, workers: int) -> tuple[float, str]:
    """MB/s of a preparation, and the digest."""
    shutil.rmtree(output, ignore_errors=True)
    config = DataConfig(train=(str(rows),), tokenizer=str(tokenizer), workers=workers)
    start = time.perf_counter()
    index = read_index(prepare(config, output))
    seconds = time.perf_counter() - start
    return sum(total(shards).num_bytes for shards in index.splits.values()) / 1e6 / seconds, index.digest


if __name__ == "__main__":
    main()
