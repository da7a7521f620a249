"""The parts of engine_plan.py. Standard library only: a bare host runs them with its own Python."""
