"""Docker engines of hosts, and the containers that ddtree runs there."""
