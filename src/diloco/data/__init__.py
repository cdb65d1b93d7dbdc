"""From text to batches: corpora, tokenizers, packed shards, and which windows a replica reads."""
