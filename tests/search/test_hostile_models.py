"""An index folder from elsewhere executes no code and connects to nothing, whatever its model.json says."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from fake_index import picture

from nearfar import networks
from nearfar.search import Index

VIT = {"model_type": "vit", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
PROCESSOR = {"size": 224}
KERNELS = ("owner/kernel", "flash_attention_2", "kernels-community/flash-attn2:entry")

# Opens folders as the commands do, and prints what was executed or asked that is not of the environment.
OPEN = """
import json, os, sys, types
from nearfar.cli import main
from nearfar.search import Index
from nearfar.serve import create
import torch, transformers
inside = (sys.prefix, sys.base_prefix, os.environ["SOURCES"], "<")
seen, watching = [], []
def outside(file):
    return isinstance(file, str) and not os.path.realpath(file).startswith(inside) and not file.startswith("<")
def watch(event, given):
    if not watching:
        return
    file = given[0].co_filename if event == "exec" else given[1] if event in ("compile", "import") else None
    if event.startswith(("socket.", "subprocess.", "os.exec", "urllib.")) or outside(file):
        seen.append([watching[-1], event, repr(given)[:200]])
def load(name, **settings):
    if ":" in name or "/" in name:
        seen.append([watching[-1], "timm", name])
    raise RuntimeError("no such model")
sys.modules["timm"] = types.SimpleNamespace(create_model=load)
sys.addaudithook(watch)
for folder in sys.argv[2:]:
    if not folder.endswith("index"):  # the first, whose model is ours, loads what is loaded once
        watching.append(folder)
    for command in (lambda: main(["search", folder, sys.argv[1]]), lambda: create(Index.open(folder, read_only=True))):
        try:
            command()
        except (Exception, SystemExit):
            pass
print(chr(10) + json.dumps(seen))
os._exit(0)
"""


def descriptions(evil):
    """What model.json says of its network, by what is wrong with it."""

    def of(config, name="transformers:some/vit"):
        return {"name": name, "config": config, "processor": PROCESSOR}

    code = {"auto_map": {"AutoConfig": "evil.Config", "AutoModel": "evil.Model"}, "_name_or_path": str(evil)}
    found = {
        "a folder": {"name": f"transformers:{evil}"},
        "a folder below this one": {"name": f"transformers:{evil.name}"},
        "a folder with settings": of(VIT, f"transformers:{evil}"),
        "a repository": {"name": "transformers:owner/vit"},
        "code": of({**VIT, **code}),
        "code of a type of its own": of({**VIT, **code, "model_type": "evil"}),
        "no type": of({}),
        "a type that is a path": of({"model_type": str(evil)}),
        "quantization": of({**VIT, "quantization_config": {"quant_method": str(evil), "load_in_4bit": True}}),
        "a function of torch": of({**VIT, "dtype": "load", "torch_dtype": "load"}),
        "an activation": of({**VIT, "hidden_act": f"{evil}/evil.py"}),
        "network of timm": of({"model_type": "timm_wrapper", "architecture": "hf-hub:owner/vit"}),
        "backbone of timm": of(
            {"model_type": "timm_backbone", "backbone": "resnet18", "use_pretrained_backbone": True}
        ),
        "a network in a network": of({"model_type": "detr", "use_pretrained_backbone": True, "backbone": "resnet18"}),
        "an ensemble": {"ensemble": [{"name": f"transformers:{evil}"}], "normalize": True},
        "pretrained": {"name": "timm:resnet18", "pretrained": True},
    }
    for kernel in KERNELS:
        for key in ("attn_implementation", "_attn_implementation", "_attn_implementation_internal"):
            found[f"{key} {kernel}"] = of({**VIT, key: kernel})
            found[f"{key} {kernel} within"] = of({"model_type": "clip", "vision_config": {**VIT, key: kernel}})
            found[f"{key} {kernel} of parts"] = of({**VIT, key: {"": kernel}})
    for source in ("hf-hub:", "HF-HUB:", "hf_hub:", " hf-hub:", "\thf-hub:", "local-dir:", "Local-Dir:", ""):
        for place in ("owner/vit", str(evil), f"../{evil.name}"):
            found[f"timm {source}{place}"] = {"name": f"timm:{source}{place}"}
    for key in ("pretrained_cfg", "checkpoint_path", "cache_dir", "pretrained_cfg_overlay"):
        found[f"timm {key}"] = {"name": "timm:resnet18", key: str(evil)}
    return found


def test_no_saved_network_executes_code_or_connects(tmp_path):
    pytest.importorskip("transformers", exc_type=ImportError)
    (tmp_path / "photos" / "jay").mkdir(parents=True)
    picture(1).save(tmp_path / "photos" / "jay" / "1.png")
    Index.build(networks.create("small_cnn", dim=4), tmp_path / "photos", out=tmp_path / "index", device="cpu").close()
    evil, ran = tmp_path / "evil", tmp_path / "ran"
    evil.mkdir()
    (evil / "evil.py").write_text(f"open({str(ran)!r}, 'w').close()")
    auto_map = {"AutoConfig": "evil.Config", "AutoModel": "evil.Model"}
    (evil / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": auto_map}))
    (evil / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    folders = []
    for name, description in descriptions(evil).items():
        folders.append(tmp_path / f"{len(folders)} {name.replace('/', ' ')}")
        shutil.copytree(tmp_path / "index", folders[-1])
        card = json.loads((folders[-1] / "model" / "model.json").read_text())
        card["model"] = {**description, "dim": 4} if "ensemble" not in description else description
        (folders[-1] / "model" / "model.json").write_text(json.dumps(card))
    sources = os.path.realpath(Path(networks.__file__).parents[3])
    done = subprocess.run(
        [sys.executable, "-c", OPEN, tmp_path / "photos" / "jay" / "1.png", tmp_path / "index", *folders],
        cwd=tmp_path,
        env={**os.environ, "SOURCES": sources, "HF_HOME": str(tmp_path / "hub"), "HF_HUB_DISABLE_TELEMETRY": "1"},
        input="y\n" * 1000,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert json.loads(done.stdout.splitlines()[-1]) == []
    assert not ran.exists()
