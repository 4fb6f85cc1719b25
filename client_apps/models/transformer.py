"""Causal language models of transformers: a small one made from sizes, or any from a folder or the hub."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from client_apps.config import integer, only_known_keys
from client_apps.errors import ConfigError

log = logging.getLogger(__name__)

_SIZES = {"layers": 2, "width": 64, "heads": 4}


def gpt(config: Mapping[str, Any], *, tokens: int, context: int) -> nn.Module:
    """Make a decoder-only Transformer, initialised from the global generator.

    It is a small Llama (rotary positions, RMSNorm, SwiGLU of twice the width, no biases): its linear layers are
    nn.Linear, q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj and lm_head, and no weights are tied.

    Parameters
    ----------
    config : Mapping[str, Any]
        The section `model`: `name`, which must be gpt, `layers` (2), `width` (64) and `heads` (4).
    tokens, context : int
        Size of the vocabulary, and the most tokens of a sequence.

    Raises
    ------
    ConfigError
        The model or a key is unknown, or a size is out of range.
    """
    if not isinstance(config, Mapping) or "name" not in config:
        raise ConfigError("model.name is missing; set model=gpt.")
    if config["name"] != "gpt":
        raise ConfigError(f"model.name={config['name']} is no language model, which task=lora needs; set model=gpt.")
    only_known_keys(config, ["name", *_SIZES], "model")
    sizes = {**_SIZES, **{key: config[key] for key in _SIZES if key in config}}
    for key, value in sizes.items():
        integer(f"model.{key}", value, 1)
    if sizes["width"] % (2 * sizes["heads"]):  # rotary positions turn pairs of a head's coordinates
        raise ConfigError(
            f"model.width={sizes['width']} must be divisible by twice model.heads={sizes['heads']}; change one of them."
        )
    made: nn.Module = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=tokens,
            max_position_embeddings=context,
            hidden_size=sizes["width"],
            intermediate_size=2 * sizes["width"],
            num_hidden_layers=sizes["layers"],
            num_attention_heads=sizes["heads"],
            num_key_value_heads=sizes["heads"],
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=None,
        )
    )
    return made


def pretrained(name: str, *, tokens: int, context: int) -> nn.Module:
    """Read a causal language model from a folder or, by its name, from the hub, in float32.

    Only safetensors are read, and no code that comes with a model is run.

    Parameters
    ----------
    name : str
        A folder as save_pretrained writes it, or a name on the Hugging Face hub.
    tokens, context : int
        The size of the vocabulary and the length of sequences it must be able to take.

    Raises
    ------
    ConfigError
        There is no such model, or it is too small.
    """
    read: Any = AutoModelForCausalLM.from_pretrained  # typed as if it returned the model alone
    try:
        model, info = read(name, use_safetensors=True, trust_remote_code=False, output_loading_info=True)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"task.pretrained={name!r} is no causal language model that can be read, neither a folder that holds "
            "config.json and model.safetensors nor a name on the Hugging Face hub that can be reached from here; write "
            f"one with save_pretrained, or set task.pretrained=null ({' '.join(str(error).split())[:200]})."
        ) from error
    if info["missing_keys"]:  # transformers would leave them random
        raise ConfigError(
            f"task.pretrained={name!r} lacks {len(info['missing_keys'])} of its model's tensors, such as "
            f"{min(info['missing_keys'])}; take one that was saved whole."
        )
    config: Any = model.config
    if config.vocab_size < tokens:
        raise ConfigError(
            f"task.pretrained={name!r} knows {config.vocab_size} tokens and the data set has {tokens}; lower "
            "dataset.vocabulary or take another model."
        )
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and longest < context:
        raise ConfigError(
            f"task.pretrained={name!r} reads at most {longest} tokens and sequences have {context}; lower "
            "dataset.length or take another model."
        )
    made: nn.Module = model.float()
    return made


def kept(folder: Path, name: str, decides: Mapping[str, Any], model: nn.Module, train: Callable[[], None]) -> None:
    """Give a model the weights that training it would, from a file where there is one, and keep them in it.

    The file is written whole or not at all, so that processes may do so at the same time. One that is damaged, or does
    not fit the model, is made anew.

    Parameters
    ----------
    folder : Path
        Where to keep the file; made if it is not there.
    name : str
        How the file's name begins.
    decides : Mapping[str, Any]
        Everything that decides the weights; their hash is in the file's name.
    model : nn.Module
        The untrained model, on the CPU; changed in place.
    train : Callable
        Trains it in place.

    Raises
    ------
    ConfigError
        The file cannot be written.
    """
    decided = json.dumps(decides, sort_keys=True)
    file = folder / f"{name}-{hashlib.sha256(decided.encode()).hexdigest()[:16]}.safetensors"
    if file.exists():
        try:
            _load(file, model)
        except (OSError, SafetensorError, ValueError) as error:
            log.warning("%s is damaged and made anew: %s", file, error)
        else:
            log.info("the model is read from %s", file)
            return
    train()
    tensors = {key: tensor.contiguous() for key, tensor in model.state_dict().items()}
    try:
        _write(file, save(tensors, {"sha256": _digest(tensors)}))
    except OSError as error:
        raise ConfigError(
            f"The pre-trained model cannot be kept in {folder}; set task.cache_dir to a folder that can be written "
            f"({error})."
        ) from error
    log.info("the model is kept in %s", file)


def _load(file: Path, model: nn.Module) -> None:
    with safe_open(file, framework="pt") as stored:
        digest = (stored.metadata() or {}).get("sha256")
        names = stored.keys()
        tensors = {name: stored.get_tensor(name) for name in names}
    if _digest(tensors) != digest:
        raise ValueError("its contents are not what was written")
    if {key: tensor.shape for key, tensor in tensors.items()} != {k: t.shape for k, t in model.state_dict().items()}:
        raise ValueError("it holds another model")
    model.load_state_dict(tensors)


def _write(file: Path, contents: bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, draft = tempfile.mkstemp(dir=file.parent, prefix=file.stem, suffix=".part")
    try:
        with os.fdopen(handle, "wb") as out:
            out.write(contents)
        Path(draft).replace(file)
    finally:
        Path(draft).unlink(missing_ok=True)


def _digest(tensors: Mapping[str, Tensor]) -> str:
    found = hashlib.sha256()
    for key in sorted(tensors):
        found.update(f"{key} {tuple(tensors[key].shape)} {tensors[key].dtype}".encode())
        found.update(tensors[key].reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
