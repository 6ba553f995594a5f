import torch
from models.model_configs import MODEL_CONFIGS  # found as the official modules are, beside each other

assert MODEL_CONFIGS
# What the loop was given, for the test.
STEPS, RANGES, ARGS = [], [], []


class MeanMetric(torch.nn.Module):
    pass


def train_step(model, samples):
    e = torch.randn_like(samples)
    t = torch.rand(len(samples))
    z = samples + t[:, None, None, None] * (e - samples)
    loss = (model.net(z, (t, torch.zeros_like(t))) - (e - samples)).square().mean()
    loss.backward()
    return loss


def train_one_epoch(
    model, compiled_train_step, data_loader, optimizer, lr_schedule, device, epoch, log_writer, args, meters
):
    model.train(True)
    ARGS.append(args)
    for i, (samples, _) in enumerate(data_loader):
        step = i + len(data_loader) * epoch
        STEPS.append(step)
        RANGES.append((samples.min().item(), samples.max().item(), len(samples)))
        assert step / len(data_loader) >= 0
        optimizer.zero_grad()
        compiled_train_step(model, samples * 2 - 1)
        optimizer.step()
        model.update_ema()
        lr_schedule.step()
