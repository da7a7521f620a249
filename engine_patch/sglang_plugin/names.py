"""The names under which the plugin is known."""

from __future__ import annotations

# What `--speculative-algorithm` takes. The second is used when a later SGLang has an algorithm of that name.
ALGORITHM = "DDTREE"
FALLBACK_ALGORITHM = "DDTREE_PLUGIN"

ENTRY_POINT_GROUP = "sglang.srt.plugins"
ENTRY_POINT = "ddtree"

# Grep for this in a server's log: it is there in every process that has loaded the plugin.
MARKER = "ddtree plugin"
