"""From text to batches: corpora, tokenizers, packed shards, and the windows that each replica reads."""
