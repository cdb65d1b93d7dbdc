"""Weights that are published, and followed."""

import os
import tempfile

import torch

import diloco

url = os.environ.get("WEIGHTS", tempfile.mkdtemp())
model, followed, step = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2), 100

# --8<-- [start:publish]
publisher = diloco.Publisher(url)  # a directory, or a bucket such as s3://BUCKET/weights
publisher.publish(model, step=step)  # returns when the version is there
# --8<-- [end:publish]

# --8<-- [start:follow]
follower = diloco.Follower(url)
for version in follower:  # each newest version, once it is there
    follower.load_into(followed)  # in place, on CPU or GPU
    print(f"step {version.step}, digest {version.digest}")
    # --8<-- [end:follow]
    break
assert torch.equal(followed.weight, model.weight.bfloat16().float())
