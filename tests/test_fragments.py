import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from diloco.errors import UserError
from diloco.fragments import Fragment, check_partition, sequential, strided, whole


class Decoder(nn.Module):
    """Embedding, a list of blocks of two parameters each, a norm, and a head, tied or not."""

    def __init__(self, num_blocks: int, tied: bool = False):
        super().__init__()
        self.embedding = nn.Embedding(3, 2)
        self.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(2)
        self.head = nn.Linear(2, 3, bias=False)
        if tied:
            self.head.weight = self.embedding.weight


OUTSIDE = ("embedding.weight", "norm.weight", "norm.bias", "head.weight")


@given(st.data(), st.integers(1, 14), st.booleans(), st.sampled_from([strided, sequential, whole]))
def test_fragments_partition_the_trainable_parameters(data, num_blocks, tied, cut):
    model = Decoder(num_blocks, tied)
    for block in model.blocks:
        block.bias.requires_grad_(data.draw(st.booleans()))
    size = data.draw(st.integers(1, num_blocks))
    fragments = whole(model) if cut is whole else cut(model, layers_per_fragment=size)

    names = [name for fragment in fragments for name in fragment.parameters]
    assert sorted(names) == sorted(name for name, p in model.named_parameters() if p.requires_grad)
    check_partition(model, fragments)
    if cut is not whole:
        assert len(fragments) == -(-num_blocks // size) + 1
        assert max(len(fragment.blocks) for fragment in fragments) <= size


@given(st.integers(1, 14), st.data())
def test_a_block_fragment_holds_its_blocks_and_nothing_else(num_blocks, data):
    size = data.draw(st.integers(1, num_blocks))
    B = -(-num_blocks // size)
    paths = [f"blocks.{i}" for i in range(num_blocks)]
    model = Decoder(num_blocks)
    for fragments, blocks_of in (
        (strided(model, layers_per_fragment=size), [paths[b::B] for b in range(B)]),
        (sequential(model, layers_per_fragment=size), [paths[b * size : (b + 1) * size] for b in range(B)]),
    ):
        *in_blocks, outside = fragments
        assert [list(fragment.blocks) for fragment in in_blocks] == blocks_of
        for fragment in in_blocks:
            assert set(fragment.parameters) == {f"{b}.{p}" for b in fragment.blocks for p in ("weight", "bias")}
        assert outside == Fragment(OUTSIDE)


def test_by_default_three_blocks_form_a_fragment():
    assert strided(Decoder(7))[0].blocks == ("blocks.0", "blocks.3", "blocks.6")
    assert sequential(Decoder(7))[0].blocks == ("blocks.0", "blocks.1", "blocks.2")


def test_whole_is_one_fragment():
    model = Decoder(2)
    assert whole(model) == (Fragment(tuple(name for name, _ in model.named_parameters())),)


@pytest.mark.parametrize("cut", [strided, sequential, whole])
def test_a_tied_head_counts_once_under_its_first_name(cut):
    assert cut(Decoder(3, tied=True))[-1].parameters.count("embedding.weight") == 1
    assert "head.weight" not in cut(Decoder(3, tied=True))[-1].parameters


def test_a_model_of_nothing_but_blocks_has_no_fragment_outside_them():
    model = nn.Sequential()
    model.layers = nn.ModuleList(nn.Linear(1, 1) for _ in range(4))
    assert [fragment.blocks for fragment in strided(model, layers_per_fragment=2)] == [
        ("layers.0", "layers.2"),
        ("layers.1", "layers.3"),
    ]


def test_blocks_tied_across_fragments_are_refused_by_name():
    model = Decoder(4)
    model.blocks[3].weight = model.blocks[0].weight
    with pytest.raises(ValueError, match=r"blocks\.0\.weight and blocks\.3\.weight .* fragments 0 and 1"):
        strided(model, layers_per_fragment=2)
    assert len(strided(model, layers_per_fragment=4)) == 2


def test_a_block_that_is_another_one_is_no_block_of_its_own():
    model = Decoder(4)
    model.blocks[2].weight, model.blocks[2].bias = model.blocks[0].weight, model.blocks[0].bias
    assert [fragment.blocks for fragment in strided(model, layers_per_fragment=2)] == [
        ("blocks.0",),
        ("blocks.1", "blocks.3"),
        (),
    ]
    model.blocks = nn.ModuleList([model.blocks[0]] * 3)
    with pytest.raises(ValueError, match=r"untie them, or take whole\(model\)"):
        strided(model, layers_per_fragment=1)


def test_a_block_may_stand_in_several_places_of_one_fragment():
    """Layers that share all they have, as in ALBERT: blocks count by their places."""
    model = Decoder(4)
    model.blocks = nn.ModuleList([model.blocks[0], model.blocks[1]] * 2)
    first, second, rest = strided(model, layers_per_fragment=2)
    assert first.parameters == ("blocks.0.weight", "blocks.0.bias")
    assert second.parameters == ("blocks.1.weight", "blocks.1.bias")
    assert (first.blocks, second.blocks, rest.blocks) == (("blocks.0",), ("blocks.1",), ())
    holes = Decoder(4)
    holes.blocks[1] = None  # torch allows it
    assert [fragment.blocks for fragment in strided(holes, layers_per_fragment=3)] == [
        ("blocks.0", "blocks.2", "blocks.3"),
        (),
    ]
    with pytest.raises(ValueError, match=r"blocks\.0\.weight and blocks\.2\.weight"):
        sequential(model, layers_per_fragment=2)


def test_a_block_tied_to_the_embedding_is_refused_by_name():
    model = Decoder(3)
    model.blocks[2].weight = model.head.weight = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(ValueError, match=r"blocks\.2\.weight and head\.weight"):
        strided(model)


def test_blocks_with_nothing_to_train_do_not_count():
    model = Decoder(3)
    model.blocks[1].requires_grad_(False)
    fragments = strided(model, layers_per_fragment=1)
    assert [fragment.blocks for fragment in fragments] == [("blocks.0",), ("blocks.2",), ()]
    model.blocks.requires_grad_(False)
    with pytest.raises(ValueError, match=r"no block .* has a parameter that needs a gradient"):
        strided(model, layers_per_fragment=1)


def test_a_list_of_blocks_is_named_once():
    with pytest.raises(ValueError, match="names a list of blocks twice"):
        strided(Decoder(2), layers_per_fragment=1, blocks=["blocks", "blocks"])


def test_the_parameters_of_a_block_follow_one_another():
    model = nn.Module()
    model.blocks = nn.ModuleList([nn.Linear(2, 1), nn.Linear(2, 1)])
    names = ("blocks.0.weight", "blocks.1.weight", "blocks.0.bias", "blocks.1.bias")
    with pytest.raises(ValueError, match=r"fragment 0: the parameters of block blocks\.0 must follow one another"):
        check_partition(model, [Fragment(names, ("blocks.0", "blocks.1"))])


def test_the_list_of_blocks_is_named_where_it_is_not_plain():
    model = nn.Module()
    with pytest.raises(ValueError, match="it has none: name the list with blocks="):
        strided(model)
    model.encoder = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])
    model.decoder = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])
    with pytest.raises(ValueError, match="it has encoder, decoder: name the list with blocks="):
        strided(model)
    only, outside = strided(model, layers_per_fragment=2, blocks="decoder")
    assert only.blocks == ("decoder.0", "decoder.1")
    assert outside.parameters == tuple(f"encoder.{i}.{p}" for i in (0, 1) for p in ("weight", "bias"))
    both = strided(model, layers_per_fragment=2, blocks=("decoder", "encoder"))
    assert [fragment.blocks for fragment in both] == [("decoder.0", "encoder.0"), ("decoder.1", "encoder.1")]


class Net(nn.Module):
    """A model of the given parts."""

    def __init__(self, **parts: nn.Module):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


def linears(num: int) -> list[nn.Module]:
    return [nn.Linear(2, 2) for _ in range(num)]


def with_activations(num: int) -> nn.Sequential:
    return nn.Sequential(*(part for linear in linears(num) for part in (linear, nn.ReLU())))


FOUND = {
    "sequential": (Net(embed=nn.Linear(2, 2), body=nn.Sequential(*linears(3))), "body.0 body.1 body.2"),
    "the model itself": (with_activations(3), "0 2 4"),
    "dict": (Net(body=nn.ModuleDict(dict(zip("abc", linears(3), strict=True)))), "body.a body.b body.c"),
    "one list beside sequentials": (
        Net(stem=with_activations(2), blocks=nn.ModuleList(linears(1)), head=with_activations(2)),
        "blocks.0",
    ),
    "one list in a sequential": (
        nn.Sequential(Net(layers=nn.ModuleList(linears(2))), *linears(2)),
        "0.layers.0 0.layers.1",
    ),
    "sequentials in a sequential": (
        Net(stages=nn.Sequential(with_activations(2), with_activations(2)), head=nn.Linear(2, 2)),
        "stages.0 stages.1",
    ),
    "children of different classes are no blocks": (
        Net(head=nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)), body=with_activations(2)),
        "body.0 body.2",
    ),
    "two lists, one of single parts": (
        Net(blocks=nn.ModuleList(linears(2)), heads=nn.ModuleList(linears(1))),
        "blocks.0 blocks.1",
    ),
    "two lists, one frozen": (
        Net(vision=nn.ModuleList(linears(2)).requires_grad_(False), text=nn.ModuleList(linears(2))),
        "text.0 text.1",
    ),
}


@pytest.mark.parametrize(("model", "blocks"), FOUND.values(), ids=FOUND)
def test_the_only_container_of_blocks_is_found(model, blocks):
    fragments = sequential(model, layers_per_fragment=1)
    assert [path for fragment in fragments for path in fragment.blocks] == blocks.split()


LISTED = {
    "features, classifier": Net(features=with_activations(2), classifier=with_activations(2)),
    "layer1, layer2": Net(
        stem=nn.Linear(2, 2), layer1=nn.Sequential(*linears(2)), layer2=nn.Sequential(*linears(2))
    ),
    "encoder.layers, decoder.layers": nn.Transformer(4, 2, 2, 2, 4, batch_first=True),
    "none": nn.ModuleDict({"only": nn.Linear(1, 1)}),
    "a, b": Net(a=nn.ModuleList(linears(1)), b=nn.ModuleList(linears(1))),
}


@pytest.mark.parametrize(("listed", "model"), LISTED.items())
def test_several_containers_of_blocks_are_listed(listed, model):
    with pytest.raises(ValueError, match=f"nn.Sequential, and it has {listed}: name the list with blocks="):
        strided(model)
    if listed != "none":
        assert len(strided(model, layers_per_fragment=1, blocks=listed.split(", "))) > 1


@pytest.mark.slow
def test_the_blocks_of_transformers_models_are_found():
    transformers = pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "vocab_size": 9,
    }
    expected = {
        transformers.GPT2LMHeadModel: (
            transformers.GPT2Config(n_layer=3, n_embd=8, n_head=2, vocab_size=9, n_positions=8),
            "transformer.h",
        ),
        transformers.LlamaForCausalLM: (transformers.LlamaConfig(**sizes, num_key_value_heads=2), "model.layers"),
        transformers.BertForMaskedLM: (transformers.BertConfig(**sizes), "bert.encoder.layer"),
        transformers.MixtralForCausalLM: (
            transformers.MixtralConfig(**sizes, num_key_value_heads=2, num_local_experts=2),
            "model.layers",
        ),
        transformers.ViTForImageClassification: (
            transformers.ViTConfig(**sizes, image_size=8, patch_size=4),
            "vit.*layers?",
        ),
    }
    for kind, (config, path) in expected.items():
        model = kind(config)
        blocks = [block for fragment in sequential(model, layers_per_fragment=1) for block in fragment.blocks]
        assert len(blocks) == 3, kind
        assert all(re.fullmatch(rf"{path}\.{i}", block) for i, block in enumerate(blocks)), blocks
    config = transformers.T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=2, num_heads=2, vocab_size=9)
    t5 = transformers.T5ForConditionalGeneration(config)
    with pytest.raises(
        ValueError, match=r"it has encoder\.block, decoder\.block: .* blocks=\['encoder.block', 'deco"
    ):
        strided(t5)
    both = sequential(t5, layers_per_fragment=2, blocks=["encoder.block", "decoder.block"])
    assert [fragment.blocks[:1] for fragment in both] == [("encoder.block.0",), ("decoder.block.0",), ()]


@pytest.mark.parametrize(
    ("blocks", "message"),
    [("layers", "no module 'layers'"), ("norm", "blocks='norm' is not a list of modules, but LayerNorm")],
)
def test_blocks_must_name_a_list(blocks, message):
    with pytest.raises(ValueError, match=message):
        strided(Decoder(3), blocks=blocks)


def test_lists_inside_blocks_are_part_of_their_block():
    model = nn.Module()
    model.layers = nn.ModuleList(nn.ModuleDict({"experts": nn.ModuleList([nn.Linear(1, 1)])}) for _ in range(2))
    assert strided(model, layers_per_fragment=1)[1] == Fragment(
        ("layers.1.experts.0.weight", "layers.1.experts.0.bias"), ("layers.1",)
    )


def test_a_block_is_not_taken_for_another_whose_number_it_begins_with():
    fragments = sequential(Decoder(11), layers_per_fragment=1)
    assert fragments[1].parameters == ("blocks.1.weight", "blocks.1.bias")


@pytest.mark.parametrize("size", [0, 4])
def test_layers_per_fragment_lies_between_one_and_the_number_of_blocks(size):
    with pytest.raises(ValueError, match=f"layers_per_fragment.*{size}"):
        strided(Decoder(3), layers_per_fragment=size)


@pytest.mark.parametrize("cut", [strided, sequential])
def test_a_model_of_few_blocks_is_one_block_fragment_and_the_rest(cut):
    assert [fragment.blocks for fragment in cut(Decoder(2))] == [("blocks.0", "blocks.1"), ()]


@pytest.mark.parametrize("cut", [strided, sequential])
@pytest.mark.parametrize("size", [1.5, 2.0, "2"])
def test_layers_per_fragment_is_a_whole_number(cut, size):
    with pytest.raises(ValueError, match=f"^layers_per_fragment={size!r} must be a whole number$"):
        cut(Decoder(3), layers_per_fragment=size)


BLOCK = ("blocks.0.weight", "blocks.0.bias")


@pytest.mark.parametrize(
    ("fragments", "message"),
    [
        ([BLOCK], r"no fragment holds embedding\.weight, norm\.weight, norm\.bias"),
        ([BLOCK, OUTSIDE[:-1], ("norm.bias",)], r"norm\.bias is in fragments 1 and 2"),
        ([BLOCK, OUTSIDE[:-1], ("norm.scale",)], r"norm\.scale, which the model does not have"),
        ([BLOCK, OUTSIDE], r"head\.weight, .* \(a tied parameter counts once, under its first name"),
        ([BLOCK, (), OUTSIDE[:-1]], r"fragment 1 holds no parameter"),
    ],
)
def test_fragments_that_are_no_partition_are_refused_with_the_names(fragments, message):
    with pytest.raises(ValueError, match=message):
        check_partition(Decoder(1, tied=True), [Fragment(parameters) for parameters in fragments])


def test_a_frozen_parameter_has_no_place_in_a_fragment():
    model = Decoder(1)
    fragments = whole(model)
    model.norm.bias.requires_grad_(False)
    with pytest.raises(ValueError, match=r"norm\.bias, which the model .* has frozen"):
        check_partition(model, fragments)


@pytest.mark.parametrize("cut", [strided, sequential, whole])
def test_fragments_are_cut_from_a_module_with_something_to_train(cut):
    with pytest.raises(UserError, match=r"are cut from a torch\.nn\.Module, and this is a list: pass the model"):
        cut([nn.Linear(1, 1)])


def test_a_model_that_is_frozen_has_no_fragments():
    with pytest.raises(UserError, match="no parameter of the model needs a gradient: unfreeze"):
        whole(nn.Linear(1, 1).requires_grad_(False))
