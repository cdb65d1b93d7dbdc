import re
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

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


def test_a_model_of_nothing_but_blocks_has_no_fragment_outside_them():
    model = nn.Sequential()
    model.layers = nn.ModuleList(nn.Linear(1, 1) for _ in range(4))
    assert [fragment.blocks for fragment in strided(model, layers_per_fragment=2)] == [
        ("layers.0", "layers.2"),
        ("layers.1", "layers.3"),
    ]


def test_a_block_that_is_another_one_is_no_block_of_its_own():
    model = Decoder(4)
    model.blocks[2].weight, model.blocks[2].bias = model.blocks[0].weight, model.blocks[0].bias
    assert [fragment.blocks for fragment in strided(model, layers_per_fragment=2)] == [
        ("blocks.0",),
        ("blocks.1", "blocks.3"),
        (),
    ]


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


def test_blocks_with_nothing_to_train_do_not_count():
    model = Decoder(3)
    model.blocks[1].requires_grad_(False)
    fragments = strided(model, layers_per_fragment=1)
    assert [fragment.blocks for fragment in fragments] == [("blocks.0",), ("blocks.2",), ()]


def test_the_list_of_blocks_is_named_where_it_is_not_plain():
    model = nn.Module()
    model.encoder = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])
    model.decoder = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])
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
    "itself": nn.ModuleDict({"only": nn.Linear(1, 1)}),
    "layer1, layer2, layer3": Net(  # one block a stage, as the smallest ResNets have
        stem=nn.Linear(2, 2), **{f"layer{n}": nn.Sequential(nn.Sequential(nn.Linear(2, 2))) for n in (1, 2, 3)}
    ),
    "a, b": Net(a=nn.ModuleList(linears(1)), b=nn.ModuleList(linears(1))),
}


@pytest.mark.parametrize(("listed", "model"), LISTED.items())
def test_several_containers_of_blocks_are_listed(listed, model):
    with pytest.raises(ValueError, match=f"nn.Sequential, and it has {listed}: name the list with blocks="):
        strided(model)
    blocks = [""] if listed == "itself" else listed.split(", ")
    assert len(strided(model, layers_per_fragment=1, blocks=blocks)) >= len(blocks)


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


def test_lists_inside_blocks_are_part_of_their_block():
    model = nn.Module()
    model.layers = nn.ModuleList(nn.ModuleDict({"experts": nn.ModuleList([nn.Linear(1, 1)])}) for _ in range(2))
    assert strided(model, layers_per_fragment=1)[1] == Fragment(
        ("layers.1.experts.0.weight", "layers.1.experts.0.bias"), ("layers.1",)
    )


@pytest.mark.parametrize("cut", [strided, sequential])
def test_a_model_of_few_blocks_is_one_block_fragment_and_the_rest(cut):
    assert [fragment.blocks for fragment in cut(Decoder(2))] == [("blocks.0", "blocks.1"), ()]


BLOCK = ("blocks.0.weight", "blocks.0.bias")


def changed(num_blocks: int, change: Callable[[Decoder], object]) -> Decoder:
    """A decoder after a change."""
    model = Decoder(num_blocks)
    change(model)
    return model


def tied(model: Decoder, number: int, other: nn.Module) -> None:
    other.weight = model.blocks[number].weight = nn.Parameter(torch.ones(2, 2))


def checked(model: nn.Module, *fragments: tuple[str, ...] | Fragment) -> None:
    check_partition(model, [one if isinstance(one, Fragment) else Fragment(one) for one in fragments])


REFUSALS: list[tuple[Callable[[], object], str]] = [
    (
        lambda: strided(changed(4, lambda m: tied(m, 0, m.blocks[3])), layers_per_fragment=2),
        r"blocks\.0\.weight and blocks\.3\.weight .* fragments 0 and 1",
    ),
    (lambda: strided(changed(3, lambda m: tied(m, 2, m.head))), r"blocks\.2\.weight and head\.weight"),
    (
        lambda: strided(changed(1, lambda m: m.blocks.extend([m.blocks[0]] * 2)), layers_per_fragment=1),
        r"untie them, or take whole\(model\)",
    ),
    (
        lambda: strided(changed(2, lambda m: m.blocks.requires_grad_(False)), layers_per_fragment=1),
        r"no block .* has a parameter that needs a gradient",
    ),
    (lambda: strided(Decoder(2), blocks=["blocks", "blocks"]), "names a list of blocks twice"),
    (lambda: strided(Decoder(3), blocks="layers"), "no module 'layers'"),
    (lambda: strided(Decoder(3), blocks="norm"), "blocks='norm' is not a list of modules, but LayerNorm"),
    (lambda: strided(Net(only=nn.Linear(1, 1))), r"has its blocks in no nn.ModuleList, .* take whole\(model\)"),
    *((lambda n=n: strided(Decoder(3), layers_per_fragment=n), f"layers_per_fragment.*{n}") for n in (0, 4)),
    (lambda: strided(Decoder(3), layers_per_fragment=2.0), "^layers_per_fragment=2.0 must be a whole number$"),
    (lambda: sequential(Decoder(3), layers_per_fragment="2"), "^layers_per_fragment='2' must be a whole number$"),
    *(
        (lambda cut=cut: cut([nn.Linear(1, 1)]), "and this is a list: pass the")
        for cut in (strided, sequential, whole)
    ),
    (
        lambda: strided(checkpoint_wrapper(Decoder(4)), layers_per_fragment=2),
        r"no parameter's name begins with _checkpoint_wrapped_module\.blocks\.0\., .*: wrap the blocks in",
    ),
    (lambda: whole(nn.Linear(1, 1).requires_grad_(False)), "no parameter of the model needs a gradient: unfreeze"),
    (lambda: checked(Decoder(1, True), BLOCK), r"no fragment holds embedding\.weight, norm\.weight, norm\.bias"),
    (
        lambda: checked(Decoder(1, True), BLOCK, OUTSIDE[:-1], ("norm.bias",)),
        r"norm\.bias is in fragments 1 and 2",
    ),
    (
        lambda: checked(Decoder(1, True), BLOCK, OUTSIDE[:-1], ("norm.scale",)),
        r"norm\.scale, which the model does not have",
    ),
    (lambda: checked(Decoder(1, True), BLOCK, OUTSIDE), r"head\.weight, .* \(a tied parameter counts once, under"),
    (lambda: checked(Decoder(1, True), BLOCK, (), OUTSIDE[:-1]), "fragment 1 holds no parameter"),
    (
        lambda: checked(changed(1, lambda m: m.norm.bias.requires_grad_(False)), *whole(Decoder(1))),
        r"norm\.bias, which the model .* has frozen",
    ),
    (
        lambda: checked(Decoder(2), Fragment((BLOCK[0], "blocks.1.weight", BLOCK[1]), ("blocks.0", "blocks.1"))),
        r"fragment 0: the parameters of block blocks\.0 must follow one another",
    ),
]


@pytest.mark.parametrize(("make", "message"), REFUSALS, ids=[message for _, message in REFUSALS])
def test_what_is_no_partition_is_refused_with_the_names(make, message):
    with pytest.raises(UserError, match=message):
        make()
