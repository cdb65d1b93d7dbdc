"""From the replicas' payloads to one average."""
