"""Causal language models of `transformers` behind our contract: logits, caches, states, weights, adapters."""

import json
import warnings

import pytest
import torch
from tests.models.gpt2 import write_config, write_model

import diloco
from diloco.errors import UserError
from diloco.evaluation.likelihoods import likelihoods
from diloco.fragments import strided
from diloco.models.hugging_face_config import hugging_face_model
from diloco.models.writer import Writer, generate
from diloco.publishing.directories import FollowedDirectory
from diloco.training.config import resolve

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

TOKENS = torch.arange(40).view(2, 20) * 5 % 257


@pytest.fixture(autouse=True)
def _quiet():
    """Let transformers and peft warn of what they like."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "gpt2")


def test_the_logits_are_those_of_transformers_with_dropout_off(folder):
    model = hugging_face_model(str(folder)).initial(seed=0)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model.train()
    with torch.no_grad():
        assert torch.equal(model(TOKENS), theirs(TOKENS).logits)
        assert torch.equal(model(TOKENS), model(TOKENS)), "the config asks for dropout of 0.1"


def test_the_seed_draws_weights_where_there_are_none(tmp_path):
    config = hugging_face_model(str(write_config(tmp_path)))
    one, same, other = (config.initial(seed=seed).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["model.transformer.wte.weight"], other["model.transformer.wte.weight"])
    before = torch.get_rng_state()
    config.build(seed=5)
    assert torch.equal(torch.get_rng_state(), before), "the caller's generator is left alone"


def test_a_state_holds_each_trained_parameter_once(folder):
    model = hugging_face_model(str(folder)).build(seed=0)
    state = {name: torch.full_like(value, 0.5) for name, value in model.state_dict().items()}
    assert list(state) == [name for name, _ in model.named_parameters()], "the head is tied to the embedding"
    model.load_state_dict(state)
    assert model.model.lm_head.weight.eq(0.5).all()
    with pytest.raises(RuntimeError, match="the state of another model: "):
        model.load_state_dict(dict(list(state.items())[1:]))


def test_blocks_and_fragments_are_found(folder):
    model = hugging_face_model(str(folder)).build(seed=0)
    assert [type(block).__name__ for block in model.blocks] == ["GPT2Block"] * 4
    blocks = [fragment.blocks for fragment in strided(model, layers_per_fragment=2)]
    assert blocks == [
        ("model.transformer.h.0", "model.transformer.h.2"),
        ("model.transformer.h.1", "model.transformer.h.3"),
        (),
    ]


def test_the_counts_are_those_of_the_matrices(folder):
    config = hugging_face_model(str(folder))
    assert config.num_matrix_params == 12 * 4 * 32**2 + (257 + 64) * 32
    assert (
        config.num_trained_params == config.num_params == sum(p.numel() for p in config.build(seed=0).parameters())
    )
    assert (config.num_layers, config.width, config.vocab_size) == (4, 32, 257)


def test_greedy_text_is_that_of_transformers(folder):
    model = hugging_face_model(str(folder)).initial(seed=0)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    writer = Writer(model, context=64, temperature=0)
    writer.read(TOKENS[0].tolist())
    expected = theirs.generate(TOKENS[:1], max_new_tokens=30, do_sample=False, pad_token_id=0)[0, 20:].tolist()
    assert [*generate(writer, len(expected))] == expected


SMALL = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
NARROW = SMALL | {"intermediate_size": 32, "num_key_value_heads": 2, "head_dim": 8}
OTHERS = {
    "llama": NARROW,
    "gemma2": NARROW | {"sliding_window": 4},
    "mixtral": NARROW | {"num_local_experts": 4},
    "lfm2": NARROW | {"layer_types": ["conv", "full_attention"]},
    "mamba": {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4},
}


@pytest.mark.parametrize("kind", OTHERS)
def test_a_cache_changes_no_logits(kind, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, **OTHERS[kind]}))
    model = hugging_face_model(str(tmp_path)).build(seed=0)
    tokens = TOKENS % 64
    with torch.no_grad():
        expected, cache = model(tokens), model.new_cache()
        if cache is None:
            assert kind == "mamba", "a recurrent model reads all again"
            return
        parts = [model(tokens[:, a:b], cache) for a, b in ((0, 7), (7, 8), (8, 20))]
        torch.testing.assert_close(torch.cat(parts, dim=1), expected, atol=1e-5, rtol=1e-4)
    scores = likelihoods(model, [([1, 2, 3], [4]), ([1, 2, 3], [5, 6])], max_length=16, device=torch.device("cpu"))
    log_p = model(torch.tensor([[1, 2, 3, 5]])).log_softmax(-1)[0]
    assert scores[1].log_likelihood == pytest.approx((log_p[2, 5] + log_p[3, 6]).item(), rel=1e-4)


def test_adapters_begin_as_the_model_and_are_all_that_is_trained(folder):
    pytest.importorskip("peft")
    config = hugging_face_model(str(folder), lora="rank=2,targets=c_attn")
    one, same, other = (config.initial(seed=seed) for seed in (0, 0, 1))
    base = hugging_face_model(str(folder)).initial(seed=0)
    with torch.no_grad():
        assert torch.equal(one(TOKENS), base(TOKENS)), "B is zero"
    trained = [name for name, parameter in one.named_parameters() if parameter.requires_grad]
    assert list(one.state_dict()) == trained and len(trained) == 2 * 4
    assert sum(value.numel() for value in one.state_dict().values()) == 4 * 2 * (32 + 3 * 32)
    assert config.num_trained_params == 4 * 2 * (32 + 3 * 32) < config.num_matrix_params
    drawn = "model.base_model.model.transformer.h.0.attn.c_attn.lora_A.default.weight"
    assert torch.equal(one.state_dict()[drawn], same.state_dict()[drawn])
    assert not torch.equal(one.state_dict()[drawn], other.state_dict()[drawn])
    one(TOKENS).sum().backward()
    assert [name for name, parameter in one.named_parameters() if parameter.grad is not None] == trained


def test_published_adapters_are_read_by_peft(folder, tmp_path):
    peft = pytest.importorskip("peft")
    config = hugging_face_model(str(folder), lora="rank=2,targets=c_attn+wpe")
    adapted = config.initial(seed=0)
    for value in adapted.state_dict().values():
        torch.nn.init.normal_(value, std=0.2)
    named = {config.published_name(name): value for name, value in adapted.state_dict().items()}
    saved = peft.get_peft_model_state_dict(adapted.model, save_embedding_layers=False)
    assert named.keys() == saved.keys(), "those of an embedding, too: wpe has lora_embedding_A, and no .weight"
    with diloco.Publisher(str(tmp_path / "place"), dtype=None) as publisher:
        version = publisher.publish(named, step=1, files=config.published_files())
    with diloco.Follower(str(tmp_path / "place")) as follower:
        follower.update()
        files = {name: follower.file(name) for name in version.files}
        FollowedDirectory(tmp_path / "to").write(version, follower.state, files)
    base = transformers.AutoModelForCausalLM.from_pretrained(folder)
    read = peft.PeftModel.from_pretrained(base, tmp_path / "to" / "current").eval()
    with torch.no_grad():
        torch.testing.assert_close(read(input_ids=TOKENS).logits, adapted.eval()(TOKENS))


@pytest.mark.parametrize("target", ["wte", "lm_head"])
def test_an_adapter_of_a_tied_weight_is_merged_into_that_alone(target, folder, tmp_path):
    pytest.importorskip("peft")
    config = hugging_face_model(str(folder), lora=f"rank=2,targets={target}+c_fc")
    adapted = config.initial(seed=0)
    for value in adapted.state_dict().values():
        torch.nn.init.normal_(value, std=0.5)
    with torch.no_grad():
        expected = adapted(TOKENS)
        config.export(adapted, tmp_path, context=64, bos_id=256, merged=True)
        merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
        error = (merged(TOKENS).logits - expected).norm()
    assert error < 1e-5 * expected.norm(), "W + BA is added up before the product with x, not after it"


def test_weights_of_four_bits_get_adapters_and_are_widened_where_those_are_merged(tmp_path, monkeypatch):
    for package in ("peft", "bitsandbytes"):
        pytest.importorskip(package)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=257, **sizes))
    model.save_pretrained(tmp_path / "whole")
    settings = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    load = transformers.AutoModelForCausalLM.from_pretrained
    load(tmp_path / "whole", quantization_config=settings).save_pretrained(tmp_path / "small")
    config = hugging_face_model(str(tmp_path / "small"), lora="rank=2")
    adapted = config.initial(seed=0)
    for value in adapted.state_dict().values():
        torch.nn.init.normal_(value, std=0.2)
    gradients = []
    for _ in range(2):
        adapted.zero_grad()
        adapted(TOKENS).logsumexp(-1).sum().backward()
        gradients.append([value.grad for value in adapted.parameters() if value.requires_grad])
        with torch.no_grad():
            adapted(TOKENS)
    assert all(map(torch.equal, *gradients)), "an evaluation changes nothing"
    config.export(adapted, tmp_path / "merged", context=20, bos_id=256, merged=True)
    merged = load(tmp_path / "merged")
    with torch.no_grad():
        expected, whole = adapted(TOKENS), model(TOKENS).logits
        error = (merged(input_ids=TOKENS).logits - expected).norm()
    assert error < 0.02 * (expected - whole).norm()
    assert {value.dtype for value in merged.parameters()} == {torch.float32}
    assert sum(value.numel() for value in adapted.state_dict().values()) == config.num_trained_params
    with pytest.raises(UserError, match=r"keeps .*absmax in a buffer, .*: take adapters, with model.lora"):
        hugging_face_model(str(tmp_path / "small")).initial(seed=0)
    monkeypatch.setattr(resolve, "memory_bytes", lambda: config.num_matrix_params)
    resolve.check_model(config, here=True)
    with pytest.raises(UserError, match="the parameters alone take"):
        resolve.check_model(hugging_face_model(str(tmp_path / "whole")), here=True)


def test_on_meta_the_weights_are_not_read(folder):
    pytest.importorskip("peft")
    config = hugging_face_model(str(folder), lora="rank=2")
    with torch.device("meta"):
        model = config.build(seed=0)
    assert all(parameter.is_meta for parameter in model.parameters())
