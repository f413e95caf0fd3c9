"""Real MQTT brokers for tests: mosquitto on a free loopback port, and an authority that issues its certificates."""

import getpass
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest


class Broker:
    """A mosquitto whose configuration is `lines`; each start appends to mosquitto.log in its folder."""

    def __init__(self, folder: Path, *lines: str) -> None:
        folder.mkdir(exist_ok=True)
        self.folder, self.port = folder, free_port()
        self._log = folder / "mosquitto.log"
        self.configure(*lines)
        self.start()

    @property
    def url(self) -> str:
        return f"mqtt://127.0.0.1:{self.port}"

    def configure(self, *lines: str) -> None:
        """For the next start. Nobody is asked for a password unless the lines want it."""
        anonymous = () if any(line.startswith("allow_anonymous") for line in lines) else ("allow_anonymous true",)
        text = [f"user {getpass.getuser()}", f"listener {self.port} 127.0.0.1", *anonymous, *lines]
        (self.folder / "mosquitto.conf").write_text("\n".join(text) + "\n")

    def start(self) -> None:
        program = shutil.which("mosquitto", path="/usr/sbin:/usr/bin:/usr/local/sbin:/usr/local/bin")
        if program is None:
            pytest.fail("mosquitto is absent: run `apt-get install mosquitto`")
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [program, "-v", "-c", str(self.folder / "mosquitto.conf")], stdout=log, stderr=log
            )
        until(self._listens, f"mosquitto listens; see {self._log}")

    def kill(self) -> None:
        """As a crash or a power cut would."""
        self._process.kill()
        self._process.wait()

    def save(self, persistence: Path) -> None:
        """Write sessions and subscriptions to disk, where the configuration says so."""
        database = persistence / "mosquitto.db"
        database.unlink(missing_ok=True)
        self._process.send_signal(signal.SIGUSR1)
        until(database.exists, "mosquitto has saved")

    def _listens(self) -> bool:
        assert self._process.poll() is None, self._log.read_text()
        try:
            socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
        except OSError:
            return False
        return True


class Authority:
    """A certificate authority of openssl's."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder, self.certificate = folder, folder / "ca.crt"
        (folder / "index.txt").touch()
        (folder / "ca.conf").write_text(
            "[ca]\ndefault_ca = own\n[own]\ndatabase = index.txt\nnew_certs_dir = .\nrand_serial = yes\n"
            "default_md = sha256\npolicy = any\ncopy_extensions = copy\nunique_subject = no\n"
            "[any]\ncommonName = supplied\n"
        )
        self._openssl(
            "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", "ca.key",
            "-out", "ca.crt", "-days", "30", "-subj", "/CN=Test authority",
        )  # fmt: skip

    def issue(self, name: str, begin: str = "20200101000000Z") -> tuple[Path, Path]:
        """A certificate for 127.0.0.1 and its key."""
        key, request, certificate = f"{name}.key", f"{name}.csr", f"{name}.crt"
        self._openssl(
            "req", "-new", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", key,
            "-out", request, "-subj", f"/CN={name}", "-addext", "subjectAltName = IP:127.0.0.1",
        )  # fmt: skip
        self._openssl(
            "ca", "-config", "ca.conf", "-batch", "-notext", "-cert", "ca.crt", "-keyfile", "ca.key", "-in", request,
            "-out", certificate, "-startdate", begin, "-enddate", "20991231000000Z",
        )  # fmt: skip
        (self.folder / key).chmod(0o600)
        return self.folder / certificate, self.folder / key

    def _openssl(self, *arguments: str) -> None:
        if shutil.which("openssl") is None:
            pytest.fail("openssl is absent: run `apt-get install openssl`")
        subprocess.run(["openssl", *arguments], cwd=self.folder, check=True, capture_output=True)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def until(true, what: str, timeout_s: float = 30.0) -> None:
    """Wait until a condition holds."""
    end = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < end, f"not in {timeout_s} s: {what}"
        time.sleep(0.02)
