"""One address in front of all replicas of a service: the gateway smg, started and checked like a service."""
