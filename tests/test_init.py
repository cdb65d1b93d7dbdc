import subprocess
import sys

import pytest

import diloco


def test_importing_the_package_and_its_schedule_warns_of_nothing_and_loads_nothing_heavy():
    code = "import sys, diloco, diloco.schedule; print({'torch', 'numpy'} & set(sys.modules), diloco.__version__)"
    process = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60
    )
    assert (process.stdout, process.stderr) == (f"set() {diloco.__version__}\n", "")


def test_every_public_name_can_be_loaded():
    assert all(getattr(diloco, name) is not None for name in diloco.__all__)
    assert set(diloco.__all__) == set(dir(diloco)) >= {"StreamingDiLoCo", "UserError", "codec", "__version__"}
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = diloco.Nothing
