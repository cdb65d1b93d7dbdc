"""The names for one's own outer rule, merge rule, codec, transport, masters or model family.

They and their modules stand in `extend.pyi`, which type checkers read as well; each is loaded on its first use.
"""

from diloco import names_of_stub

__all__, __getattr__, __dir__ = names_of_stub(__name__, __file__)
