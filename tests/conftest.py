from hypothesis import settings
from jaxtyping import install_import_hook

# The shapes and types that the mathematics is annotated with are checked at every call.
CHECKED = [
    "diloco.outer",
    "diloco.wire.blocks",
    "diloco.wire.floats",
    "diloco.wire.integers",
    "diloco.wire.sparse",
    "diloco.models",
]
install_import_hook(CHECKED, "beartype.beartype")

# The same examples in every run, however slow the computer is.
settings.register_profile("diloco", deadline=None, derandomize=True)
settings.load_profile("diloco")
