"""The engine: Streaming DiLoCo around anybody's model and training loop.

The public class is in `streaming`, and what a replica does alone in `replica`; `fixed` joins a fixed group by an
exchange, and `elastic` replicas that come and go by a rendezvous.
"""
