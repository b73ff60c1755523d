"""The pipeline: wiring of the components, its compilation, and the local runner."""
