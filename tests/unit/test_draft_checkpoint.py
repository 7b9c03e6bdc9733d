"""Heads on disk, their vocabulary, and the targets they can be made for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, LlamaConfig, Qwen2Config

from tlt.draft.checkpoint import head_tensors, load_head, save_head
from tlt.draft.config import make_head_config
from tlt.draft.model import Eagle3Head
from tlt.draft.vocab import choose_draft_vocab
from tlt.errors import ConfigError

TARGET = LlamaConfig(
    vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=12, num_attention_heads=4, head_dim=8
)


def make_head() -> Eagle3Head:
    return Eagle3Head(make_head_config(TARGET, draft_vocab_size=4), torch.tensor([3, 7, 8, 49]))


def test_a_head_survives_the_disk_in_the_published_layout(tmp_path: Path) -> None:
    """Catches names or maps that stock vLLM would not find, and an embedding that would overwrite the target's."""
    head = make_head()
    save_head(tmp_path / "head", head, info={"target": {"sha256": "x"}})
    tensors = load_file(tmp_path / "head" / "model.safetensors")
    assert {"fc.weight", "midlayer.self_attn.q_proj.weight", "norm.weight", "lm_head.weight"} <= set(tensors)
    assert not any("embed" in name for name in tensors)
    assert tensors["d2t"].tolist() == [3, 6, 6, 46]  # token id - draft id
    assert tensors["t2d"].nonzero().flatten().tolist() == [3, 7, 8, 49]
    again = load_head(tmp_path / "head")
    assert again.draft_token_ids.tolist() == [3, 7, 8, 49]
    for name, value in head_tensors(head).items():
        assert torch.equal(again.state_dict()[name].bfloat16(), value), name


def test_other_spellings_load_and_damaged_heads_do_not(tmp_path: Path) -> None:
    """Catches a published head that is refused for its layer's name, and a wrong shape or NaN that is taken."""
    folder = tmp_path / "head"
    save_head(folder, make_head(), info={})
    good = load_file(folder / "model.safetensors")
    save_file({n.replace("midlayer.", "layers.0."): t for n, t in good.items()}, folder / "model.safetensors")
    load_head(folder)
    save_file(good | {"fc.weight": torch.zeros(3, 3)}, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"fc.weight has shape \(3, 3\)"):
        load_head(folder)
    save_file(good | {"norm.weight": torch.full((32,), float("nan"))}, folder / "model.safetensors")
    with pytest.raises(ConfigError, match="not finite"):
        load_head(folder)
    save_file({n: t for n, t in good.items() if n != "d2t"}, folder / "model.safetensors")
    with pytest.raises(ConfigError, match="d2t"):
        load_head(folder)
    (folder / "model.safetensors").write_bytes(b"junk")
    with pytest.raises(ConfigError, match="cannot read"):
        load_head(folder)
    with pytest.raises(ConfigError, match="cannot read"):
        load_head(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": None}, "vocab_size"),
        ({"num_attention_heads": 5}, "not a multiple"),
        ({"hidden_size": "x"}, "hidden_size"),
        ({"logit_scale": 0.5}, "logit_scale"),
        ({"norm_output": True}, "norm_output"),
        ({"num_hidden_layers": 2}, "num_hidden_layers"),
    ],
)
def test_odd_configurations_are_refused(tmp_path: Path, change: dict[str, object], message: str) -> None:
    """Catches a traceback in place of an error, and a head that an engine computes otherwise than we do."""
    folder = tmp_path / "head"
    save_head(folder, make_head(), info={})
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ConfigError, match=message):
        load_head(folder)


def test_heads_are_made_for_llama_and_qwen_targets_only() -> None:
    """Catches a head for a family whose states or rope it would get wrong, and layers that the target lacks."""
    assert make_head_config(TARGET, draft_vocab_size=4).eagle_aux_hidden_state_layer_ids == [2, 6, 9]
    qwen = Qwen2Config(vocab_size=50, hidden_size=32, num_attention_heads=4, num_hidden_layers=8, rope_theta=1e6)
    config = make_head_config(qwen, draft_vocab_size=4)
    assert (config.head_dim, config.attention_bias) == (8, False)
    assert config.rope_parameters == qwen.rope_parameters
    with pytest.raises(ConfigError, match="gpt2"):
        make_head_config(GPT2Config(), draft_vocab_size=4)
    with pytest.raises(ConfigError, match="draft_vocab_size=51"):
        make_head_config(TARGET, draft_vocab_size=51)
    with pytest.raises(ConfigError, match="aux_layers"):
        make_head_config(TARGET, draft_vocab_size=4, aux_layers=[2, 6, 12])


def test_the_draft_vocabulary_has_the_most_frequent_tokens() -> None:
    """Hand-computed. Catches a missing end-of-sequence token, with which no draft would ever end a response."""
    counts = torch.tensor([0, 5, 5, 9, 0, 1])
    assert choose_draft_vocab(counts, 3).tolist() == [1, 2, 3]
    assert choose_draft_vocab(counts, 3, always=[4]).tolist() == [1, 3, 4]
    assert choose_draft_vocab(counts, 5).tolist() == [0, 1, 2, 3, 5]
    with pytest.raises(ConfigError, match="size 7"):
        choose_draft_vocab(counts, 7)
