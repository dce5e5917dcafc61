"""Named problem sets: what ``configs/data/NAME.yaml`` says of a file; the file itself is the user's.

Such a YAML is a hydra group as well: ``megarl train +data=gsm8k data.path=...`` trains on the same columns, prompts and
reader that ``megarl eval --set gsm8k=PATH`` examines.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, ValidationError

from megarl.algos.coverrl import REVISE, REVISE_CHOICE, Requests
from megarl.settings import AnswersConfig, DataConfig, Section


class PairsConfig(Section):
    """Columns of a file of solutions to judge (RewardBench): for each prompt a right solution and a wrong one."""

    chosen: str = Field(default="chosen", description="column of the right solution")
    rejected: str = Field(default="rejected", description="column of the wrong solution")
    subset: str = Field(default="subset", description="column by which results are also given apart")
    only: tuple[str, ...] = Field(default=(), strict=False, description="subsets that are asked; empty: all")


class ExamSet(Section):
    """A problem set: how its file is read, asked, and graded."""

    name: str
    data: DataConfig
    answers: AnswersConfig = AnswersConfig()
    wording: Requests | None = Field(default=None, description="of later turns; null: as CoVerRL trains with")
    pairs: PairsConfig | None = Field(default=None, description="the model verifies given solutions, solves nothing")

    @property
    def requests(self) -> Requests:
        """What is said in later turns, if there are any."""
        return self.wording or Requests(revise=REVISE_CHOICE if self.data.wrong else REVISE)


def named_sets(folders: Sequence[Path]) -> dict[str, Path]:
    """Name -> YAML file, of the ``data`` groups of these configuration folders; a later folder's file wins."""
    return {file.stem: file for folder in folders for file in sorted((folder / "data").glob("*.yaml"))}


def open_set(spelled: str, folders: Sequence[Path]) -> ExamSet:
    """The set that ``NAME=PATH`` means: a known name, or the path of a YAML file of the user's own (which may also
    name its file in data.path, so that PATH is left out)."""
    name, _, path = spelled.partition("=")
    known = named_sets(folders)
    file = Path(name) if name.endswith((".yaml", ".yml")) else known.get(name)
    if file is None or not file.is_file():
        raise ValueError(
            f"--set {spelled}: {name!r} is neither a YAML file nor a known set; known: {', '.join(sorted(known))}"
        )
    raw = _read(file)
    data = {**raw.get("data", {}), **({"path": path} if path else {})}
    if "path" not in data:
        raise ValueError(f"--set {spelled}: where is its file? Write --set {name}=PATH")
    if not Path(data["path"]).is_file():
        raise ValueError(f"--set {spelled}: no such file: {data['path']}")
    try:
        return ExamSet.model_validate({**raw, "name": file.stem, "data": data})
    except ValidationError as error:
        faults = (f"{'.'.join(map(str, f['loc']))}: {f['msg']}" for f in error.errors())
        raise ValueError(f"{file}: {'; '.join(faults)}") from error


def _read(file: Path) -> dict[str, Any]:
    try:
        raw = yaml.safe_load(file.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{file}: not YAML ({' '.join(str(error).split())})") from error
    if not isinstance(raw, dict) or not isinstance(raw.get("data", {}), dict):
        raise ValueError(f"{file}: expected a mapping with a section data")
    return raw
