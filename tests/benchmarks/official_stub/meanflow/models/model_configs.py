from types import SimpleNamespace

from torch import nn

from fullstride.meanflow.models.song_unet import SongUNet

MODEL_CONFIGS = {"unet": {"img_resolution": 32, "in_channels": 3, "out_channels": 3, "channel_mult": [2, 2, 2]}}


class Net(nn.Module):
    def __init__(self, configs):
        super().__init__()
        sizes = {"channels": "model_channels", "attention_resolutions": "attn_resolutions"}
        same = {key: key for key in ("channel_mult", "num_blocks", "dropout")}
        given = {ours: configs[theirs] for ours, theirs in (sizes | same).items()}
        given["augment_dim"] = configs.get("augment_dim", 0)
        self.inner = SongUNet(configs["in_channels"], configs["img_resolution"], **given)

    def forward(self, x, time_steps, aug_cond=None):
        t, h = time_steps
        return self.inner(x, t - h, t, augment=aug_cond)


class Model(nn.Module):
    def __init__(self, args, configs):
        super().__init__()
        self.net, self.net_ema = Net(configs), Net(configs)
        self.net_ema.load_state_dict(self.net.state_dict())
        self.args = SimpleNamespace(**vars(args))

    def update_ema(self):
        for average, weight in zip(self.net_ema.parameters(), self.net.parameters(), strict=True):
            average.data.lerp_(weight.data, 1 - self.args.ema_decay)


def instantiate_model(args):
    augmented = {"augment_dim": 6} if args.use_edm_aug else {}
    return Model(args, MODEL_CONFIGS[args.arch] | {"dropout": args.dropout} | augmented)
