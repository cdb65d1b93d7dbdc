"""What the checker knows of transformers: from its own front door it would read all models, for 15 seconds."""

from typing import Any

from transformers.trainer_callback import TrainerCallback as TrainerCallback
from transformers.trainer_callback import TrainerControl as TrainerControl
from transformers.trainer_callback import TrainerState as TrainerState
from transformers.training_args import TrainingArguments as TrainingArguments

def __getattr__(name: str) -> Any: ...
