import torch
import torch.nn.functional as F

from diloco.models.decoder_config import DecoderConfig
from diloco.models.language_model import generate, next_token_loss


def test_loss_is_cross_entropy_and_z_loss():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, 11, generator=generator, dtype=torch.float32)
    targets = torch.randint(0, 11, (2, 3), generator=generator)
    loss, objective = next_token_loss(logits, targets, 0.1)
    torch.testing.assert_close(loss, F.cross_entropy(logits.view(-1, 11), targets.view(-1)))
    torch.testing.assert_close(objective - loss, 0.1 * logits.exp().sum(-1).log().square().mean())


def test_generate_takes_the_likeliest_token_where_only_one_is_allowed():
    model = DecoderConfig(num_layers=2, num_heads=2, width=16, vocab_size=11).build(seed=0)
    written = generate(model, [1, 2], 6, seed=0, context=4, top_k=1)
    tokens = [1, 2]
    for _ in range(6):
        tokens.append(int(model(torch.tensor([tokens[-4:]]))[0, -1].argmax()))
    assert written == tokens[2:]
