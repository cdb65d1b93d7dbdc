import pytest

from diloco.data.config import DataConfig
from diloco.errors import UserError


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"train": ()}, "data.train names no source"),
        ({"text_field": ""}, "data.text_field='' names no text"),
        ({"held_out_fraction": 0.0}, "data.held_out_fraction=0.0 must lie between"),
        ({"held_out_fraction": 1.0}, "data.held_out_fraction=1.0 must lie between"),
        ({"max_train_bytes": 0}, "data.max_train_bytes=0 must be at least 1"),
        ({"tokenizer": "bpe:8k"}, "data.tokenizer=bpe:8k is not of the form"),
        ({"tokenizer": "bpe:1234567890"}, "data.tokenizer=bpe:1234567890 is not of the form"),
        (
            {"held_out_fraction": 0.1, "held_out": ("a.txt", "b.txt")},
            r"data.held_out_fraction=0.1 contradicts data.held_out=a\.txt b\.txt:",
        ),
    ],
)
def test_a_config_that_contradicts_itself(fields, message):
    with pytest.raises(UserError, match=message) as refusal:
        DataConfig(**fields)
    assert refusal.value.fields == tuple(f"data.{name}" for name in fields)
