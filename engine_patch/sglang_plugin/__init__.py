"""DDTree as an out-of-tree plugin of SGLang 0.5.23 (see docs/engine-sglang.md).

Modules that must work without SGLang or without a GPU (`config`, `pin`, `memory`, `check`) import neither at
module level; those that subclass SGLang's classes (`algorithm`, `worker`, ...) are imported by SGLang's
processes only.
"""
