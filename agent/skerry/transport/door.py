"""Where the broker is and what opens it: the address, TLS, the password. Knows no MQTT."""

import ssl
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from skerry.config import Mqtt
from skerry.errors import ConfigError


class Door:
    """Where the broker is and what it wants to see, from the configuration and the files that it names."""

    def __init__(self, config: Mqtt) -> None:
        """Raises ConfigError with every problem."""
        self._problems: list[str] = []
        self.host, self.port, tls = "", 0, False
        self.username, self.password = config.username, None
        self.context: ssl.SSLContext | None = None
        with self._problem("url"):
            self.host, self.port, tls = _address(config.url or "")
        if config.password_file:
            with self._problem("password_file", config.password_file):
                _require_private(config.password_file)
                self.password = Path(config.password_file).read_text("utf-8").rstrip("\r\n")
        if tls:
            self._load(config)
        elif used := [key for key in ("ca_file", "cert_file", "key_file") if getattr(config, key)]:
            self._problems.append(f"mqtt.{used[0]}: needs an mqtts:// url")
        if self._problems:
            raise ConfigError(self._problems)

    def _load(self, config: Mqtt) -> None:
        with self._problem("ca_file", config.ca_file or "the system's certificates"):
            self.context = ssl.create_default_context(cafile=config.ca_file)
        if config.cert_file is None:
            if config.key_file is not None:
                self._problems.append("mqtt.key_file: needs mqtt.cert_file")
            return
        private = config.key_file or config.cert_file  # one file may hold both
        key = "key_file" if config.key_file else "cert_file"
        with self._problem(key, private):
            _require_private(private)
            if self.context:  # an empty password, so that an encrypted key fails instead of asking at the terminal
                self.context.load_cert_chain(config.cert_file, config.key_file, password="")

    @contextmanager
    def _problem(self, key: str, path: str | None = None) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            self._problems.append(f"mqtt.{key}: {f'{path}: ' if path else ''}{reason}")


def _address(url: str) -> tuple[str, int, bool]:
    """Host, port, whether TLS. Raises ValueError."""
    parts = urlsplit(url)
    if parts.scheme not in ("mqtt", "mqtts") or not parts.hostname:
        raise ValueError(f"{url!r} is not mqtt://host[:port] or mqtts://host[:port]")
    if parts.username is not None or parts.password is not None:
        raise ValueError("the user does not belong here; use mqtt.username and mqtt.password_file")
    if parts.path.strip("/") or parts.query or parts.fragment:
        raise ValueError(f"{url!r} has something after the port")
    tls = parts.scheme == "mqtts"
    return parts.hostname, parts.port or (8883 if tls else 1883), tls


def _require_private(path: str) -> None:
    if Path(path).stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ValueError(f"others than its owner can read it; run: chmod 600 {path}")
