"""The engine: Streaming DiLoCo around anybody's model and training loop."""
