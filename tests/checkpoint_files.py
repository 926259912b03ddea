"""A synthetic checkpoint before it is written, and the parts of which layouts are made.

Weights are random, and every tensor differs from every other.
"""

import json
from dataclasses import dataclass, replace

import torch
from architectures import ARCHITECTURES, VOCAB
from refusals import refused
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from specdec.checkpoints import survey_checkpoint
from specdec.checkpoints.eagle import EAGLE
from specdec.checkpoints.mask_token import MASK_TOKEN

HIDDEN, WIDE, HEADS, KV_HEADS, HEAD_DIM, DRAFT_VOCAB = 32, 24, 4, 2, 8, 20
NUM_LAYERS = 8


@dataclass(frozen=True)
class Files:
    """`config.json` and tensors by their names in the file."""

    config: dict
    tensors: dict

    def but(self, *dropped, **keys):
        """With top-level keys set or, where the value is `...`, removed; some tensors dropped."""
        config = {k: v for k, v in (self.config | keys).items() if v is not ...}
        return Files(config, {k: t for k, t in self.tensors.items() if k not in dropped})

    def plus(self, named, seed=7):
        """With further tensors; a shape stands for a random one."""
        given = {name: x for name, x in named.items() if isinstance(x, torch.Tensor)}
        shapes = {name: x for name, x in named.items() if name not in given}
        return replace(self, tensors=self.tensors | tensors(shapes, seed) | given)

    def write(self, folder, container="safetensors"):
        """Writes the folder: `safetensors`, `sharded`, `bin` or `sharded bin`."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        is_pickle = container.endswith("bin")
        name, suffix = ("pytorch_model", "bin") if is_pickle else ("model", "safetensors")
        save = torch.save if is_pickle else save_file
        if not container.startswith("sharded"):
            save(self.tensors, folder / f"{name}.{suffix}")
            return folder
        shards = [f"{name}-{i + 1:05d}-of-00002.{suffix}" for i in range(2)]
        for i, shard in enumerate(shards):
            save(dict(list(self.tensors.items())[i::2]), folder / shard)
        weight_map = {key: shards[i % 2] for i, key in enumerate(self.tensors)}
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / f"{name}.{suffix}.index.json").write_text(json.dumps(index))
        return folder


def tensors(shapes, seed=0):
    """Random tensors; norms are near one."""
    generator, result = torch.Generator().manual_seed(seed), {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        result[name] = 1 + 0.1 * noise if "norm" in name else 0.2 * noise
    return result


def layer(prefix, width=HIDDEN, *, hidden=HIDDEN, bias="", qk_norm=False, norms=()):
    """Shapes of a decoder layer whose queries, keys and values read `width` channels."""
    queries, keys = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    rows = {"q": (queries, width), "k": (keys, width), "v": (keys, width), "o": (hidden, queries)}
    shapes = {f"{prefix}.self_attn.{n}_proj.weight": shape for n, shape in rows.items()}
    shapes |= {f"{prefix}.self_attn.{n}_proj.bias": rows[n][:1] for n in bias}
    shapes |= {f"{prefix}.self_attn.{n}_norm.weight": (HEAD_DIM,) for n in "qk" * qk_norm}
    shapes |= {f"{prefix}.mlp.{n}_proj.weight": (WIDE, hidden) for n in ("gate", "up")}
    shapes[f"{prefix}.mlp.down_proj.weight"] = (hidden, WIDE)
    names = (*norms, "post_attention_layernorm")
    return shapes | {f"{prefix}.{name}.weight": (hidden,) for name in names}


def biases(which):
    """Shapes of the first layer's biases."""
    shapes = layer("layers.0", bias=which)
    return {name: shape for name, shape in shapes.items() if name.endswith("bias")}


def plain_layers(indices, *, norm="input_layernorm", prefix="layers", **options):
    """Shapes of plain layers, whose first norm has a given name."""
    found = {}
    for i in indices:
        found |= layer(f"{prefix}.{i}", norms=(norm,), **options)
    return found


def eagle3_shapes(prefix="midlayer", *, num_features=3, hidden=HIDDEN, **options):
    """Shapes of a one-layer EAGLE-3 head."""
    norms = ("input_layernorm", "hidden_norm")
    return {
        "fc.weight": (hidden, num_features * HIDDEN),
        **layer(prefix, 2 * hidden, hidden=hidden, norms=norms, **options),
        **{"norm.weight": (hidden,), "lm_head.weight": (DRAFT_VOCAB, hidden)},
    }


def vocab_map(ids=None):
    """Offsets and membership of ids of the target, ascending ones by default."""
    ids = torch.arange(1, 3 * DRAFT_VOCAB, 3) if ids is None else torch.as_tensor(ids)
    t2d = torch.zeros(VOCAB, dtype=torch.bool)
    t2d[ids] = True
    return {"d2t": ids - torch.arange(len(ids)), "t2d": t2d}


def full_vocabulary(files, **keys):
    """The files of a head that proposes all ids."""
    return files.but("d2t", "t2d", **keys).plus({"lm_head.weight": (VOCAB, HIDDEN)})


def rope(theta, **more):
    """The library's record of rotary positions."""
    return {"rope_type": "default", "rope_theta": float(theta), **more}


def tiny_llama(num_layers=NUM_LAYERS, seed=0, **changes):
    """A random Llama that the checkpoints fit."""
    sizes = ARCHITECTURES["llama"][1] | {"num_hidden_layers": num_layers} | changes
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**sizes))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.15)
    return model.eval()


TARGET = tiny_llama()


def survey(folder, target=TARGET, **options):
    """Surveys a checkpoint of either family."""
    return survey_checkpoint(folder, target, **{"families": (MASK_TOKEN, EAGLE)} | options)


def read(folder, target=TARGET, **options):
    """Reads a checkpoint of either family."""
    return survey(folder, target, **options).load(target)


def refuses(folder, message, target=TARGET, **options):
    """Reading ends in an error of one line that says so."""
    with refused(message):
        read(folder, target, **options)
