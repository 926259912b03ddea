"""Parts of synthetic EAGLE checkpoints: files, shapes of layers, keys, vocabulary maps.

Names, shapes and keys are written out here from the description of the formats, not taken from the
package: what the package reads is compared with them. Weights are random and every tensor differs
from every other.
"""

import json
from dataclasses import dataclass, replace

import pytest
import torch
from architectures import ARCHITECTURES, VOCAB
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from specdec.checkpoints import Checkpoint
from specdec.checkpoints import survey_checkpoint as survey_any
from specdec.checkpoints.eagle import EAGLE

HIDDEN, WIDE, HEADS, KV_HEADS, HEAD_DIM, DRAFT_VOCAB = 32, 24, 4, 2, 8, 20
NUM_LAYERS = 8
GENERATOR = torch.Generator().manual_seed(7)


@dataclass(frozen=True)
class Files:
    """A checkpoint before it is written: `config.json` and tensors by their names in the file."""

    config: dict
    tensors: dict

    def but(self, *dropped, **keys):
        """With top-level keys set or, where the value is `...`, removed; some tensors dropped."""
        config = {k: v for k, v in (self.config | keys).items() if v is not ...}
        return Files(config, {k: t for k, t in self.tensors.items() if k not in dropped})

    def plus(self, **tensors):
        """With further tensors; `__` in a name stands for a dot."""
        named = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
        return replace(self, tensors=self.tensors | named)

    def write(self, folder, container="safetensors"):
        """Writes the folder: `safetensors`, `sharded`, `bin` or `sharded bin`."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        save = torch.save if container.endswith("bin") else save_file
        stem = "pytorch_model.bin" if container.endswith("bin") else "model.safetensors"
        if not container.startswith("sharded"):
            save(self.tensors, folder / stem)
            return folder
        name, suffix = stem.split(".")
        weight_map = {}
        for i, key in enumerate(self.tensors):
            weight_map[key] = f"{name}-{i % 2 + 1:05d}-of-00002.{suffix}"
        for shard in sorted(set(weight_map.values())):
            part = {key: self.tensors[key] for key, file in weight_map.items() if file == shard}
            save(part, folder / shard)
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / f"{stem}.index.json").write_text(json.dumps(index))
        return folder


def tiny_llama(num_layers=NUM_LAYERS, seed=0, **changes):
    """A random Llama that the checkpoints below fit."""
    sizes = ARCHITECTURES["llama"][1] | {"num_hidden_layers": num_layers} | changes
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**sizes))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.15)
    return model.eval()


def tensors(shapes, seed=0):
    """Random tensors; norms are near one."""
    generator = torch.Generator().manual_seed(seed)
    result = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        is_norm = "norm" in name
        result[name] = 1 + 0.1 * noise if is_norm else 0.2 * noise
    return result


def layer(prefix, width, *, hidden=HIDDEN, bias="", qk_norm=False, norms=()):
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


def llama_keys(**more):
    """Keys of a Llama configuration of one layer, as all producers but speculators write them."""
    return {
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": WIDE,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-05,
        "vocab_size": VOCAB,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "torch_dtype": "float32",
        "use_cache": True,
        **more,
    }


def vocab_map(ids=None):
    """Offsets and membership of ascending ids of the target."""
    ids = torch.arange(1, 3 * DRAFT_VOCAB, 3) if ids is None else torch.as_tensor(ids)
    t2d = torch.zeros(VOCAB, dtype=torch.bool)
    t2d[ids] = True
    return {"d2t": ids - torch.arange(len(ids)), "t2d": t2d}


def eagle3_shapes(prefix="midlayer", *, num_features=3, hidden=HIDDEN, target=HIDDEN, **options):
    """Shapes of a one-layer EAGLE-3 head."""
    norms = ("input_layernorm", "hidden_norm")
    return {
        "fc.weight": (hidden, num_features * target),
        **layer(prefix, 2 * hidden, hidden=hidden, norms=norms, **options),
        "norm.weight": (hidden,),
        "lm_head.weight": (DRAFT_VOCAB, hidden),
    }


def rope(theta, **more):
    return {"rope_type": "default", "rope_theta": float(theta), **more}


def noise(*shape):
    return torch.randn(shape, generator=GENERATOR)


def norms(*names, width=HIDDEN):
    return {f"{name}.weight": 1 + 0.3 * noise(width) for name in names}


def biases(prefix, which):
    shapes = layer(prefix, 2 * HIDDEN, bias=which)
    return {name: t for name, t in tensors(shapes).items() if name.endswith("bias")}


def full_vocabulary(files, **keys):
    lm_head = 0.2 * noise(VOCAB, HIDDEN)
    return files.but("d2t", "t2d", **keys).plus(lm_head__weight=lm_head)


def more_layers(files, norm="input_layernorm", **keys):
    """A second and a third layer, whose first norm has a given name."""
    files = files.but(**keys)
    for i in (1, 2):
        shapes = layer(f"layers.{i}", HIDDEN, norms=(norm,))
        files = files.plus(**tensors(shapes, seed=i))
    return files


def narrower(hidden=16):
    """A SafeAILab EAGLE-3 head of another width than its target."""
    shapes = eagle3_shapes(hidden=hidden) | {"embed_tokens.weight": (VOCAB, hidden)}
    config = llama_keys(
        draft_vocab_size=DRAFT_VOCAB, hidden_size=hidden, target_hidden_size=32, head_dim=8
    )
    return Files(config, tensors(shapes) | vocab_map())


def own_names(files, config):
    """The file's tensors by the head's names: the renaming that the formats describe."""
    renamed = {}
    for name, tensor in files.tensors.items():
        name = name.replace("midlayer.", "layers.0.").replace("fusion_fc.", "fc.")
        name = name.replace("transformer.", "layers.0.")
        for i, level in enumerate(("low", "mid", "high")):
            name = name.replace(f"aux_norm_{level}.", f"fc_norm.{i}.")
        for i in (1, 2):
            name = name.replace(f"layers.{i}.hidden_norm", f"layers.{i}.input_layernorm")
        renamed[name] = tensor
    if not config.output_norm and not config.feedback_norm:
        renamed.pop("norm.weight", None)
    maps = {name: renamed.pop(name) for name in ("d2t", "t2d") if name in renamed}
    return renamed, maps.get("d2t")


def survey_checkpoint(folder, target=None, **options):
    """Surveys an EAGLE checkpoint."""
    return survey_any(folder, target, families=(EAGLE,), **options)


def read_checkpoint(folder, target=None, **options) -> Checkpoint:
    """Reads an EAGLE checkpoint."""
    return survey_checkpoint(folder, target, **options).load(target)


TARGET = tiny_llama()


def refuses(folder, message, **options):
    """Reading ends in a `ValueError` of one line that says so."""
    with pytest.raises(ValueError, match=message) as caught:
        read_checkpoint(folder, TARGET, **options)
    assert "\n" not in str(caught.value)
