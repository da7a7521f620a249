"""From a cluster.yaml to running, checked services, and back."""
