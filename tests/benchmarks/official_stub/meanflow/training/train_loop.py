import torch
from models.model_configs import MODEL_CONFIGS  # found as the official modules are, beside each other

assert MODEL_CONFIGS
# Inputs that the loop received, for the test.
STEPS, RANGES, ARGS, AUGMENTED = [], [], [], []


class MeanMetric(torch.nn.Module):
    pass


def augment_pipe(samples):
    AUGMENTED.append(len(samples))
    return samples, torch.rand(len(samples), 6)


def train_step(model, samples, aug_cond):
    e = torch.randn_like(samples)
    t = torch.rand(len(samples))
    z = samples + t[:, None, None, None] * (e - samples)
    loss = (model.net(z, (t, torch.zeros_like(t)), aug_cond) - (e - samples)).square().mean()
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
        compiled_train_step(model, *(augment_pipe(samples * 2 - 1) if args.use_edm_aug else (samples * 2 - 1, None)))
        optimizer.step()
        model.update_ema()
        lr_schedule.step()
