"""torch's AdamW without torch's compiler, which its optimizers import at their first use: that takes a second."""

import inspect

import torch

for _name in ("add_param_group", "zero_grad", "state_dict", "load_state_dict"):
    _method = inspect.unwrap(getattr(torch.optim.Optimizer, _name))
    # torch._compile._disable_dynamo keeps here what it calls; a version that does not is only slower to start.
    setattr(_method, "__dynamo_disable", _method)


class AdamW(torch.optim.AdamW):
    """The same steps, bit for bit, as long as none of its methods is called in code that torch compiles."""

    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))
