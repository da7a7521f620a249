"""Takes out of a bundle's strings what says where it was made: secrets, addresses, host names, folders.

An allow-list decides which fields get into a bundle; this is for the strings in them, whose content nobody
chose: an error message quotes an address, an argument is a path.
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
import re
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ddtree_ops.redact import redact_text

#: Variables whose values are taken for secrets wherever they turn up.
SECRET_VARIABLE = re.compile(r"(?i)(key|token|secret|password|passwd|credential)")
SHORTEST_SECRET = 8
SHORTEST_NAME = 4

_KEY = re.compile(r"\bsk-[A-Za-z0-9_-]{8,}")
_URL = re.compile(r"\b([a-z][a-z0-9+.-]*)://[^\s\"'<>)\],]+")
_IPV4 = re.compile(r"(?<![\d.])(?:\d{1,3}\.){3}\d{1,3}(?![\d.])")
_GROUPS = r"(?:[0-9a-fA-F]{0,4}:){2,7}[0-9a-fA-F]{1,4}"
_IPV6 = re.compile(rf"\[{_GROUPS}\]|(?<![\w:.]){_GROUPS}(?![\w:.])")
_MAIL = re.compile(r"\b[\w.+-]+@[\w-]+(?:\.[\w-]+)*")
_WINDOWS_PATH = re.compile(r"\b[A-Za-z]:\\[^\s\"']+")
#: Two parts or more; a route of a server (/v1/models) is no folder.
_PATH = re.compile(r"(?<![\w.:/\]-])~?/(?!v1/)(?:[^\s/\"'<>:,;()]+/)+[^\s/\"'<>:,;()]*")
HOMES = ("home", "Users")
LOOPBACK = ("127.0.0.1", "0.0.0.0", "::1")


class Scrubber:
    """Scrubs strings, and whatever holds them.

    names    what to call host names and addresses that are known: 'gpu-a.example.org' -> 'host-1'
    secrets  values that must not be seen
    """

    def __init__(self, names: Mapping[str, str], secrets: Iterable[str] = ()) -> None:
        known = {name: label for name, label in names.items() if name and name not in LOOPBACK}
        # The longest first: a short name may be the start of a long one.
        self._names = [
            (re.compile(rf"(?<![\w.-]){re.escape(name)}(?![\w-]|\.\w)", re.IGNORECASE), label)
            for name, label in sorted(known.items(), key=lambda item: -len(item[0]))
        ]
        self._secrets = sorted({one for one in secrets if len(one) >= SHORTEST_SECRET}, key=len, reverse=True)

    @classmethod
    def here(cls, names: Mapping[str, str], secrets: Iterable[str] = ()) -> Scrubber:
        """Also knows this machine's names and the secrets in this process's environment."""
        hosts = {socket.gethostname(), socket.gethostname().partition(".")[0], socket.getfqdn()}
        own = {name: "[this host]" for name in hosts if len(name) >= SHORTEST_NAME and name != "localhost"}
        found = [value for name, value in os.environ.items() if SECRET_VARIABLE.search(name)]
        home = str(Path.home())
        if len(home) >= SHORTEST_NAME:
            own[home] = "[home]"
        return cls({**own, **names}, [*secrets, *found])

    def text(self, text: str) -> str:
        """The string without what must not leave the house."""
        for secret in self._secrets:
            text = text.replace(secret, "[redacted]")
        text = _KEY.sub("[redacted]", redact_text(text))
        text = _URL.sub(lambda found: f"{found[1]}://[address]", text)
        text = _MAIL.sub("[address]", text)
        for name, label in self._names:
            text = name.sub(label, text)
        text = _WINDOWS_PATH.sub("[folder]", _PATH.sub(_folder, text))
        text = _IPV6.sub(_address, text)
        return _IPV4.sub(_address, text)

    def data(self, value: Any) -> Any:
        """JSON data, with all its strings scrubbed (keys as well) and cards' UUIDs hashed."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {
                self.text(str(key)): _hashed(inner) if key == "uuid" else self.data(inner)
                for key, inner in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.data(inner) for inner in value]
        return value


def _folder(found: re.Match[str]) -> str:
    """The last part says what it was about, unless it is somebody's home."""
    parts = found[0].rstrip("/.").split("/")
    return "[folder]" if len(parts) == 3 and parts[1] in HOMES else f"[folder]/{parts[-1]}"


def _address(found: re.Match[str]) -> str:
    try:
        address = ipaddress.ip_address(found[0].strip("[]"))
    except ValueError:
        return found[0]
    return found[0] if str(address) in LOOPBACK else "[address]"


def _hashed(value: Any) -> Any:
    """The same card is still known again; its serial number is nobody's business."""
    if not isinstance(value, str) or value.startswith("sha256:"):
        return value
    return f"sha256:{hashlib.sha256(value.encode()).hexdigest()[:12]}"
