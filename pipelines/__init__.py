"""The Kubeflow pipeline: definition, compilation, the local runner, and submission to a cluster."""
