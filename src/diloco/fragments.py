"""The parameters of each fragment: strided, sequential or whole."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from diloco.errors import UserError, listed


@dataclass(frozen=True)
class Fragment:
    """The parameters that are exchanged together."""

    parameters: tuple[str, ...]
    """Names as in `model.named_parameters()`, in that order."""
    blocks: tuple[str, ...] = ()
    """Module paths of its blocks, such as `blocks.0`; none for the fragment outside the blocks."""


Fragments = tuple[Fragment, ...]


def strided(
    model: nn.Module, *, layers_per_fragment: int | None = None, blocks: str | Sequence[str] | None = None
) -> Fragments:
    """Fragment b takes blocks b, b+B, b+2B, …, with B = ceil(L / layers_per_fragment) (arXiv 2501.18512, 2.1).

    Args:
        model: any module that holds its blocks in an `nn.ModuleList`, `nn.ModuleDict` or `nn.Sequential`.
        layers_per_fragment: the most blocks in a fragment; None is 3, or all where there are fewer.
        blocks: path of that list, or paths of several, one after another. None takes the model's only ModuleList
            that is in no other, or else the only container that is in no other with two trained children of one
            class.

    Returns:
        The B block fragments, then one with the parameters outside every block (embeddings, final norm, head).
        Parameters that need no gradient are in no fragment, and blocks without others do not count; a tied
        parameter is in one fragment, once.

    Raises:
        UserError: if the blocks can't be found, or a parameter belongs to two fragments.

    >>> from torch import nn
    >>> model = nn.Sequential()
    >>> model.layers = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(5))
    >>> [fragment.blocks for fragment in strided(model, layers_per_fragment=2)]
    [('layers.0', 'layers.3'), ('layers.1', 'layers.4'), ('layers.2',)]
    """
    paths = block_paths(model, blocks)
    num_fragments = -(-len(paths) // _size(paths, layers_per_fragment))
    return _partition(model, [paths[b::num_fragments] for b in range(num_fragments)])


def sequential(
    model: nn.Module, *, layers_per_fragment: int | None = None, blocks: str | Sequence[str] | None = None
) -> Fragments:
    """Fragment b takes `layers_per_fragment` consecutive blocks; else as `strided`.

    >>> from torch import nn
    >>> model = nn.Sequential()
    >>> model.layers = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(5))
    >>> [fragment.blocks for fragment in sequential(model, layers_per_fragment=2)]
    [('layers.0', 'layers.1'), ('layers.2', 'layers.3'), ('layers.4',)]
    """
    paths = block_paths(model, blocks)
    size = _size(paths, layers_per_fragment)
    return _partition(model, [paths[b : b + size] for b in range(0, len(paths), size)])


def whole(model: nn.Module) -> Fragments:
    """One fragment with every parameter: DiLoCo without streaming (arXiv 2311.08105)."""
    _check_module(model)
    return _partition(model, [])


def check_partition(model: nn.Module, fragments: Sequence[Fragment]) -> None:
    """Refuse fragments that don't partition the trainable parameters of `model`.

    Raises:
        UserError: with the names of the parameters that are in no fragment, in two, or not in the model.
    """
    trainable = dict.fromkeys(name for name, p in model.named_parameters() if p.requires_grad)
    placed: dict[str, int] = {}
    for index, fragment in enumerate(fragments):
        if not fragment.parameters:
            raise UserError(f"fragment {index} holds no parameter that needs a gradient: leave it out")
        for name in fragment.parameters:
            if name in placed:
                raise UserError(f"parameter {name} is in fragments {placed[name]} and {index}: keep it in one")
            placed[name] = index
        _check_blocks(index, fragment)
    if unknown := [name for name in placed if name not in trainable]:
        _check_wrapping(placed, trainable)
        raise UserError(
            f"fragments name {listed(unknown)}, which the model does not have, has frozen, or knows by "
            "another name (a tied parameter counts once, under its first name)"
        )
    if missing := [name for name in trainable if name not in placed]:
        raise UserError(f"no fragment holds {listed(missing)}: each trainable parameter must be in one")


def _check_wrapping(placed: Collection[str], trainable: Collection[str]) -> None:
    """Refuse fragments of a model inside the given one, or around it, as DDP and torch.compile put theirs."""
    if path := _path_before(placed, trainable):
        raise UserError(
            f"the model's parameters have names that begin with {path}., and the fragments' have not: pass "
            f"model.{path}, from which they were cut, or cut them from the model that you pass"
        )
    if path := _path_before(trainable, placed):
        raise UserError(
            f"the fragments' parameters have names that begin with {path}., and the model's have not: cut the "
            "fragments from the model that you pass"
        )


def _path_before(names: Collection[str], longer: Collection[str]) -> str | None:
    """The path that stands before each of the names in the longer ones; None if there is none."""
    first = next(iter(names), "")
    paths = (name.removesuffix(f".{first}") for name in longer if name.endswith(f".{first}"))
    return next((path for path in paths if {f"{path}.{name}" for name in names} == {*longer}), None)


def block_spans(fragment: Fragment, sizes: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """The span of each block in the fragment's flat vector: its first element, and the one after its last."""
    spans: dict[str, tuple[int, int]] = {}
    start = 0
    for name in fragment.parameters:
        end = start + sizes[name]
        for block in fragment.blocks:
            if name.startswith(block + "."):
                spans[block] = (spans.get(block, (start, end))[0], end)
        start = end
    return spans


def _check_blocks(index: int, fragment: Fragment) -> None:
    ones = dict.fromkeys(fragment.parameters, 1)
    for block, (start, end) in block_spans(fragment, ones).items():
        if not all(name.startswith(block + ".") for name in fragment.parameters[start:end]):
            raise UserError(f"fragment {index}: the parameters of block {block} must follow one another")


def _check_module(model: object) -> None:
    if not isinstance(model, nn.Module):
        kind = type(model).__name__
        raise UserError(f"fragments are cut from a torch.nn.Module, and this is a {kind}: pass the model")


def _size(paths: list[str], layers_per_fragment: int | None) -> int:
    """The most blocks in a fragment."""
    if layers_per_fragment is None:
        return min(_LAYERS_PER_FRAGMENT, len(paths))
    if not isinstance(layers_per_fragment, int):
        raise UserError(
            f"layers_per_fragment={layers_per_fragment!r} must be a whole number", "layers_per_fragment"
        )
    if layers_per_fragment < 1:
        raise UserError(f"layers_per_fragment={layers_per_fragment} must be at least 1", "layers_per_fragment")
    if layers_per_fragment > len(paths):
        raise UserError(
            f"layers_per_fragment={layers_per_fragment} is more than the model's {len(paths)} blocks",
            "layers_per_fragment",
        )
    return layers_per_fragment


_LAYERS_PER_FRAGMENT = 3


def block_paths(model: nn.Module, blocks: str | Sequence[str] | None = None) -> list[str]:
    """Module paths of the blocks, first to last."""
    _check_module(model)
    blocks = _found_blocks(model) if blocks is None else blocks
    paths = []
    for path in [blocks] if isinstance(blocks, str) else blocks:
        try:
            module = model.get_submodule(path)
        except AttributeError:
            raise UserError(f"the model has no module {path!r}: blocks must name an nn.ModuleList") from None
        if not isinstance(module, _CONTAINERS) or not len(module):
            raise UserError(f"blocks={path!r} is not a list of modules, but {type(module).__name__}")
        # Not named_children, which names a block that stands in two places only once.
        prefix = f"{path}." if path else ""
        paths += [prefix + name for name, block in module._modules.items() if block is not None]
    if len(set(paths)) < len(paths):
        raise UserError(f"blocks={blocks!r} names a list of blocks twice")
    trained = [p for p in paths if any(w.requires_grad for w in model.get_submodule(p).parameters())]
    if not trained:
        raise UserError(
            f"no block of {blocks!r} has a parameter that needs a gradient: unfreeze one, or take whole(model)"
        )
    return trained


_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def _found_blocks(model: nn.Module) -> list[str]:
    """The path of the container of the model's blocks, where there is one candidate."""
    lists = _outermost(model, lambda module: isinstance(module, nn.ModuleList) and len(module) > 0)
    candidates = lists if len(lists) == 1 else _outermost(model, _holds_blocks)
    if len(candidates) != 1:
        several = candidates or lists or _outermost(model, _has_trained_child)
        if not several:
            raise UserError(
                "the model has its blocks in no nn.ModuleList, nn.ModuleDict or nn.Sequential: take whole(model), "
                "one fragment with all parameters, or a partition of your own"
            )
        raise UserError(
            "the model should hold its blocks in one nn.ModuleList, nn.ModuleDict or nn.Sequential, and it has "
            f"{listed([path or 'itself' for path in several])}: name the list with blocks={several[0]!r}"
            + (f", or several with blocks={several[:2]}" if len(several) > 1 else "")
            + ", or take whole(model)"
        )
    return candidates


def _outermost(model: nn.Module, is_candidate: Callable[[nn.Module], bool]) -> list[str]:
    """The paths of the candidates that are in no other."""
    outermost: list[str] = []
    for path, module in model.named_modules():
        inside = any(not outer or path.startswith(outer + ".") for outer in outermost)
        if not inside and is_candidate(module):
            outermost.append(path)
    return outermost


def _has_trained_child(module: nn.Module) -> bool:
    """True for a container with something to train."""
    return isinstance(module, _CONTAINERS) and any(w.requires_grad for w in module.parameters())


def _holds_blocks(module: nn.Module) -> bool:
    """True for a container with two children of one class that have something to train."""
    if not isinstance(module, _CONTAINERS):
        return False
    children = [child for child in module._modules.values() if child is not None]
    trained = [type(child) for child in children if any(w.requires_grad for w in child.parameters())]
    return len(set(trained)) < len(trained)


def _partition(model: nn.Module, blocks_of: Sequence[list[str]]) -> Fragments:
    """Fragments of the given blocks, and a last one with the parameters outside them."""
    outside = len(blocks_of)
    fragment_of_block = {path: index for index, paths in enumerate(blocks_of) for path in paths}
    names_of: list[list[str]] = [[] for _ in range(outside + 1)]
    placed: dict[int, tuple[str, int]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not parameter.requires_grad:
            continue
        index = next((i for path, i in fragment_of_block.items() if name.startswith(path + ".")), outside)
        first_name, first_index = placed.setdefault(id(parameter), (name, index))
        if first_index != index:
            raise UserError(
                f"{first_name} and {name} are one tied parameter in fragments {first_index} and {index}: "
                "put their blocks into one fragment, untie them, or take whole(model)"
            )
        if first_name == name:
            names_of[index].append(name)
    if not placed:
        raise UserError("no parameter of the model needs a gradient: unfreeze those that are to be trained")
    for names, paths in zip(names_of, blocks_of, strict=False):
        if not names:
            raise UserError(
                f"no parameter's name begins with {paths[0]}., the path of a block, as under torch's "
                "checkpoint_wrapper: wrap the blocks in the place of the model, cut the fragments from the model "
                "inside the wrapper, or take whole(model)"
            )
    fragments = [
        Fragment(tuple(names), tuple(path for path in paths if any(name.startswith(path + ".") for name in names)))
        for names, paths in zip(names_of, [*blocks_of, []], strict=True)
        if names or paths
    ]
    check_partition(model, fragments)
    return tuple(fragments)
