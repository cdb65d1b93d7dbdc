import torch
import torch.nn.functional as F

from diloco.models.language_model import next_token_loss


def test_loss_is_cross_entropy_and_z_loss():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, 11, generator=generator, dtype=torch.float32)
    targets = torch.randint(0, 11, (2, 3), generator=generator)
    loss, objective = next_token_loss(logits, targets, 0.1)
    torch.testing.assert_close(loss, F.cross_entropy(logits.view(-1, 11), targets.view(-1)))
    torch.testing.assert_close(objective - loss, 0.1 * logits.exp().sum(-1).log().square().mean())
