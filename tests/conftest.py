from hypothesis import settings

# The same examples in every run, however slow the computer is.
settings.register_profile("diloco", deadline=None, derandomize=True)
settings.load_profile("diloco")
