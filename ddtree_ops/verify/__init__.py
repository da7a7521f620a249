"""The acceptance kit: correctness gates on anybody's host, the kernel table, a short sweep, one bundle."""
