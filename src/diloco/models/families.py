"""The model families that a stored config may name: those of this package, and each that the program imported."""

from diloco.errors import UserError
from diloco.models.decoder_config import DecoderConfig
from diloco.models.hugging_face_config import HuggingFaceConfig
from diloco.models.spec import ModelConfig

FAMILIES: tuple[type[ModelConfig], ...] = (DecoderConfig, HuggingFaceConfig)
"""The families of this package; a config that names none is of the first."""

DEFAULT_FAMILY = FAMILIES[0].family


def load_family(path: str) -> type[ModelConfig]:
    """The config class of a family.

    A config may come from a stranger: it has no module imported.

    Args:
        path: of import, as `ModelConfig.family`.

    Raises:
        UserError: if there is no such class here.

    >>> load_family(DEFAULT_FAMILY).__name__
    'DecoderConfig'
    """
    known = ModelConfig.__subclasses__()
    for family in known:
        if family.family == path:
            return family
        known += family.__subclasses__()
    raise UserError(f"model.family={path!r} is not known here: import it first", "model.family")
