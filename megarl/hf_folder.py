"""A Hugging Face model folder: its tensors as its files list them, its configuration, what lies beside the weights."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors import safe_open
from transformers import AutoConfig

from megarl.backends.shards.families import parts
from megarl.planning.models import read_shape

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")
_SAYS_NOTHING = (  # of a configuration: about the model's function
    *("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache", "initializer_range"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "attn_implementation", "_attn_implementation"),
)
_ABSENT = "(absent)"
Shapes = dict[str, tuple[int, ...]]


def find_folder(model: str) -> Path:
    """The folder of a model that is a directory, or a hub name in the local cache; nothing is downloaded."""
    if (Path(model) / "config.json").is_file():
        return Path(model)
    if model.count("/") == 1 and not Path(model).exists():
        try:
            return Path(snapshot_download(model, local_files_only=True))
        except LocalEntryNotFoundError:
            pass
    raise ValueError(f"model {model}: no folder with a config.json, nor in the Hugging Face cache")


def tensors_of(folder: Path) -> tuple[Shapes, set[str]]:
    """Names and shapes of all tensors in the folder's safetensors files, and their dtypes as those spell them."""
    shapes: Shapes = {}
    dtypes: set[str] = set()
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                view = opened.get_slice(name)
                shapes[name] = tuple(view.get_shape())
                dtypes.add(view.get_dtype())
    if not shapes:
        raise ValueError(f"{folder}: no .safetensors files with weights")
    return shapes, dtypes


def check_tensors(folder: Path) -> None:
    """Raise ValueError with a table where the tensors in the files are not those that config.json describes."""
    found, _ = tensors_of(folder)
    wanted = {part.tensor.name: part.tensor.shape for part in parts(read_shape(str(folder)), 2)}
    extra = {name for name in found.keys() - wanted.keys() if not name.endswith("rotary_emb.inv_freq")}
    if "lm_head.weight" in extra and found["lm_head.weight"] == found.get("model.embed_tokens.weight"):
        extra.remove("lm_head.weight")  # of a tied model, written twice
    odd = sorted(extra | {name for name in wanted if wanted[name] != found.get(name)})
    if odd:
        rows = [(name, str(found.get(name, _ABSENT)), str(wanted.get(name, _ABSENT))) for name in odd]
        raise ValueError(
            f"{folder}: files and config.json disagree\n{table(('tensor', 'in the files', 'by config.json'), rows)}"
        )


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str, str]]:
    """(key, value here, value there) where two configurations describe different models."""
    found = []
    for key in sorted((ours.keys() | theirs.keys()) - set(_SAYS_NOTHING)):
        here, there = ours.get(key), theirs.get(key)
        if isinstance(here, dict) and isinstance(there, dict):
            found += differences(here, there, f"{prefix}{key}.")
        elif here != there:
            found.append((f"{prefix}{key}", _said(here), _said(there)))
    return found


def _said(value: Any) -> str:
    text = _ABSENT if value is None else json.dumps(value, default=str)
    return text if len(text) <= 48 else text[:45] + "..."


def check_same_model(checkpoint: Path, folder: Path) -> None:
    """Raise ValueError with a table where the configuration that a checkpoint was saved with is not the folder's."""
    saved, given = (AutoConfig.from_pretrained(path).to_dict() for path in (checkpoint, folder))
    if rows := differences(saved, given):
        raise ValueError(
            f"{checkpoint} is of another model than {folder}\n{table(('key', 'checkpoint', 'model'), rows)}"
        )


def table(head: tuple[str, ...], rows: list[tuple[str, ...]], limit: int = 20) -> str:
    """Aligned columns; rows beyond ``limit`` are counted."""
    shown = [head, *rows[:limit]]
    widths = [max(len(row[i]) for row in shown) for i in range(len(head))]
    lines = [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in shown
    ]
    return "\n".join([*lines, *([f"  and {len(rows) - limit} more"] if len(rows) > limit else [])])


def copy_companions(folder: Path, out: Path) -> None:
    """Everything but weights: configurations, tokenizer, chat template, licence."""
    out.mkdir(parents=True, exist_ok=True)
    for file in sorted(folder.iterdir()):
        if file.is_file() and not file.name.endswith(_WEIGHTS) and not file.name.startswith("."):
            shutil.copyfile(file, out / file.name)


def finish_safetensors(out: Path) -> None:
    """Name the parts ``part-N.safetensors`` as transformers expects them, with an index where there are several."""
    files = sorted(out.glob("part-*.safetensors"), key=lambda f: int(f.stem.removeprefix("part-")))
    if len(files) == 1:
        files[0].rename(out / "model.safetensors")
        return
    weights: dict[str, str] = {}
    total = 0
    for number, file in enumerate(files, 1):
        named = out / f"model-{number:05}-of-{len(files):05}.safetensors"
        file.rename(named)
        with safe_open(named, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                weights[name] = named.name
                total += opened.get_tensor(name).nbytes
    index = {"metadata": {"total_size": total}, "weight_map": weights}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1), encoding="utf-8")
