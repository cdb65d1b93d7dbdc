"""The exchange over TLS, for jobs that diloco.connect joins with a secret or certificates."""
