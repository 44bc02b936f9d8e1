"""Find configs and experiments by name, without importing torch."""

from importlib.resources import files
from pathlib import Path

from tfidf_tune._checks import SetupError

_EXPERIMENTS = "experiments"


def config_path(name: str) -> str:
    """Return the path of a config: a file, or a config of the package (``tinyllama/1.1B_lora_memorization``).

    Raises:
        SetupError: If there is neither.
    """
    folder = _folder()
    packaged = folder / f"{name}.yaml"
    if Path(name).is_file():
        return name
    if packaged.is_file():
        return str(packaged)
    names = sorted(
        path.relative_to(folder).with_suffix("").as_posix()
        for path in folder.rglob("*.yaml")
        if path.parent.name != _EXPERIMENTS
    )
    raise SetupError(f"no config file {name}, and no config of that name; available are {', '.join(names)}")


def shipped_experiments() -> dict[str, Path]:
    """Return the files of the experiments that come with the package, sorted, by name."""
    return {file.stem: file for file in sorted((_folder() / _EXPERIMENTS).glob("*.yaml"))}


def experiment_path(name: str) -> str:
    """Return the path of an experiment: a file, or an experiment of the package (``demo`` or ``experiments/demo``).

    Raises:
        SetupError: If there is neither.
    """
    if Path(name).is_file():
        return name
    shipped = shipped_experiments()
    bare = name.removeprefix(f"{_EXPERIMENTS}/")
    if bare not in shipped:
        raise SetupError(f"no file {name}, and no experiment of that name; available are {', '.join(shipped)}")
    return str(shipped[bare])


def _folder() -> Path:
    return Path(str(files("tfidf_tune.configs")))
