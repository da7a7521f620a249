"""What the plugin raises at start-up."""

from __future__ import annotations


class PluginError(ValueError):
    """Start-up is refused: what was found, what is allowed, what to do."""


class ConfigError(PluginError):
    """`SGLANG_DDTREE_CONFIG` is not usable."""


class ArgumentError(PluginError):
    """A server argument that DDTREE cannot serve with."""


class PinError(PluginError):
    """This SGLang is not the one that the plugin was written against."""


class SelfCheckError(PluginError):
    """The start-up self-check found wrong numbers; serving would give wrong text."""
