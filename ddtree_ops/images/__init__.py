"""Images of the engines: what goes in, built on one host, carried to others, written down in a lock file."""
