import json

import pytest
import torch
from safetensors.torch import save_file

from diloco.cli.main import main


@pytest.fixture
def command(tmp_path) -> list[str]:
    save_file({"a": torch.tensor([0.0] * 4 + [1.0] * 6)}, tmp_path / "gradient.safetensors")
    return ["bench", "wire", "--values", "1000", "--gradient", str(tmp_path / "gradient.safetensors"), "--wires"]


def test_measurements_are_printed_as_a_table_or_as_json(command, capsys):
    main([*command, "e3m0", "int2:block=64", "--json"])
    first, second = json.loads(capsys.readouterr().out)
    assert first["wire"] == "e3m0:block=256,stochastic=false" and first["relative_error"] == 0
    assert second["bits_per_value"] == pytest.approx(8 * (32 + 4 * 16 + 250) / 1000)
    main([*command, "bf16"])
    assert "bf16" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fp8"], "--wires=fp8: 'fp8' is not a codec"),
        (["bf16", "--gradient", "nowhere.safetensors"], "nowhere.safetensors is no safetensors file"),
    ],
)
def test_a_mistake_ends_in_one_sentence(arguments, message, command, capsys):
    with pytest.raises(SystemExit, match="2"):
        main([*command, *arguments])
    assert message in capsys.readouterr().err
