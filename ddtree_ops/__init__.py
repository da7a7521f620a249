"""The operator's side of ddtree: services, sweeps, comparisons. Knows engines through HTTP and argv only."""

__version__ = "0.1.0"
