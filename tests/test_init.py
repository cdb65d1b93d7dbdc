import subprocess
import sys

import pytest

import diloco
import diloco.extend


def test_importing_the_package_and_its_schedule_warns_of_nothing_and_loads_nothing_heavy():
    code = "import sys, diloco, diloco.schedule; print({'torch', 'numpy'} & set(sys.modules), diloco.__version__)"
    process = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60
    )
    assert (process.stdout, process.stderr) == (f"set() {diloco.__version__}\n", "")


@pytest.mark.parametrize(
    ("module", "some"),
    [
        (diloco, {"StreamingDiLoCo", "UserError", "codec", "__version__"}),
        (diloco.extend, {"OuterRule", "MergeRule", "Codec", "Transport", "Masters", "ModelConfig"}),
    ],
    ids=["diloco", "extend"],
)
def test_every_public_name_can_be_loaded(module, some):
    assert all(getattr(module, name) is not None for name in module.__all__)
    assert set(module.__all__) == set(dir(module)) >= some
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = module.Nothing


def test_a_fixed_group_loads_no_store_nor_keys():
    code = "import sys, torch, diloco; diloco.StreamingDiLoCo; diloco.connect; diloco.codec('e3m0'); "
    code += "names = {'cryptography', 'obstore', 'tyro', 'rich', 'triton', 'diloco.exchange.encrypted'}; "
    code += "print(names & set(sys.modules))"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (process.stdout, process.stderr) == ("set()\n", "")
