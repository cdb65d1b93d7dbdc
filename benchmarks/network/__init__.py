"""A network laboratory on one machine: replicas in namespaces of their own, joined by slow links."""
